{{/* What the pods of all components have in common. */}}

{{/* Annotations: (dict "root" $ "pod" .Values.gateway.pod "own" (dict)); without `own`, what tells where metrics are. */}}
{{- define "espalier.podAnnotations" -}}
{{- $own := .own | default dict -}}
{{- if and (not .own) .root.Values.monitoring.scrapeAnnotations -}}
{{- $port := toString (int64 .root.Values.operationsPort) -}}
{{- $own = dict "prometheus.io/scrape" "true" "prometheus.io/port" $port "prometheus.io/path" "/metrics" -}}
{{- end -}}
{{- toYaml (merge (dict) .pod.annotations $own) -}}
{{- end -}}

{{/* Fields of a pod's spec: (dict "root" $ "pod" .Values.gateway.pod "selector" (list $ "gateway")), and "account", the
     ServiceAccount of a pod that uses the Kubernetes API. */}}
{{- define "espalier.podFields" -}}
{{- $root := .root -}}
{{- $selector := include "espalier.selector" .selector | fromYaml -}}
{{- if .account -}}
serviceAccountName: {{ .account }}
{{- else -}}
automountServiceAccountToken: false
{{- end }}
{{- /* Kubernetes would add variables such as ESPALIER_GATEWAY_PORT, which our settings refuse. */}}
enableServiceLinks: false
{{- with $root.Values.images.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
{{- range $key, $id := $root.Values.security }}
{{- if not (kindIs "invalid" $id) }}
  {{ $key }}: {{ int64 $id }}
{{- end }}
{{- end }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- range $key := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" }}
{{- with get $.pod $key }}
{{ $key }}: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with .pod.topologySpreadConstraints }}
topologySpreadConstraints:
{{- range . }}
{{- $constraint := . }}
{{- if not (hasKey . "labelSelector") }}{{ $constraint = merge (dict "labelSelector" (dict "matchLabels" $selector)) . }}{{ end }}
  - {{ toYaml $constraint | nindent 4 | trim }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "espalier.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Three questions: has it finished starting; can it work now; does it still turn. (dict "root" $ "startupTimeoutS" 300) */}}
{{- define "espalier.probes" -}}
startupProbe:
  httpGet: {path: /startupz, port: operations}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ divf .startupTimeoutS 5 | ceil | int64 }}
readinessProbe:
  httpGet: {path: /readyz, port: operations}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /livez, port: operations}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{/* A setting's value as text: whole numbers without exponent, lists with commas. */}}
{{- define "espalier.text" -}}
{{- if kindIs "slice" . -}}
{{- join "," . -}}
{{- else if and (kindIs "float64" .) (eq (floor .) .) -}}
{{- int64 . -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{/* Settings as variables: (dict "prefix" "ESPALIER_" "settings" (dict "stepRows" 512)) is ESPALIER_STEP_ROWS. */}}
{{- define "espalier.settings" -}}
{{- range $name, $value := .settings }}
- name: {{ $.prefix }}{{ snakecase $name | upper }}
  value: {{ include "espalier.text" $value | quote }}
{{- end }}
{{- end -}}

{{/* Variables of every service: (dict "root" $ "pod" .Values.gateway.pod). */}}
{{- define "espalier.serviceEnv" -}}
{{- $values := .root.Values -}}
{{- $auth := include "espalier.natsSecret" .root -}}
{{- $own := dict "natsUrl" (include "espalier.natsUrl" .root) -}}
{{- /* Two releases may share one broker; and while another model is rolled out, its gateways meet only its verifiers. */}}
{{- $model := sha256sum (toJson (omit $values.model "fetch")) -}}
{{- if eq $values.model.source "fetch" }}{{ $model = sha256sum (printf "%s %s" $values.model.fetch.repository $values.model.fetch.revision) }}{{ end -}}
{{- $_ := set $own "subjectPrefix" (printf "%s-%s-%s" .root.Release.Namespace (include "espalier.fullname" .root) (trunc 8 $model)) -}}
{{- $_ := set $own "logLevel" $values.logLevel -}}
{{- $_ := set $own "operationsHost" $values.listenAddress -}}
{{- $_ := set $own "operationsPort" $values.operationsPort -}}
{{- with $values.tracing.endpoint }}{{ $_ := set $own "otlpEndpoint" . }}{{ end -}}
{{- include "espalier.settings" (dict "prefix" "ESPALIER_" "settings" $own) }}
{{- if $auth }}
- name: ESPALIER_NATS_USER
  valueFrom:
    secretKeyRef: {name: {{ $auth }}, key: {{ $values.nats.auth.userKey }}}
- name: ESPALIER_NATS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ $auth }}, key: {{ $values.nats.auth.passwordKey }}}
{{- end }}
- name: HOME
  value: /tmp
{{- with include "espalier.env" .pod.env }}
{{ trim . }}
{{- end }}
{{- end -}}

{{- define "espalier.env" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{/* How many replicas: what is there if something else scales it, so that an upgrade does not undo that.
     (dict "root" $ "kind" "Deployment" "name" "..." "scaled" true "replicas" 2), and "api" if it is not apps/v1 */}}
{{- define "espalier.replicas" -}}
{{- $replicas := .replicas -}}
{{- if .scaled -}}
{{- with lookup (.api | default "apps/v1") .kind .root.Release.Namespace .name }}{{ $replicas = .spec.replicas }}{{ end -}}
{{- end -}}
{{- int64 $replicas -}}
{{- end -}}
