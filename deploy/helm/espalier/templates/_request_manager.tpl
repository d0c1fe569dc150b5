{{/* The containers of gateways and managers: (dict "root" $ "role" "gateway" "settings" .Values.gateway
     "prefixes" (dict "ESPALIER_GATEWAY_" .Values.gateway.settings)); `serves` is whether it has HTTP and a tokenizer. */}}

{{- define "espalier.requestManager" -}}
- name: request-manager
  image: {{ include "espalier.image" (list .root .root.Values.images.requestManager) }}
  imagePullPolicy: {{ .root.Values.images.pullPolicy }}
  command: [python, -m, request_manager]
  env:
    - name: ESPALIER_ROLE
      value: {{ .role }}
{{- if .serves }}
    - name: ESPALIER_MODEL
      value: {{ include "espalier.llmDir" .root }}
    - name: ESPALIER_HOST
      value: {{ .root.Values.listenAddress | quote }}
    - name: ESPALIER_PORT
      value: "8000"
    - name: ESPALIER_DRAIN_TIMEOUT_S
      value: {{ include "espalier.text" .values.drainTimeoutS | quote }}
{{- with .root.Values.gateway.apiKeys }}
{{- if .secretName }}
    - name: ESPALIER_GATEWAY_API_KEYS_FILE
      value: /etc/espalier/api-keys/{{ .key }}
{{- end }}
{{- end }}
{{- end }}
{{- range $prefix, $settings := .prefixes }}
{{- with include "espalier.settings" (dict "prefix" $prefix "settings" $settings) }}{{ trim . | nindent 4 }}{{ end }}
{{- end }}
{{- with include "espalier.serviceEnv" (dict "root" .root "pod" .values.pod) }}{{ trim . | nindent 4 }}{{ end }}
  ports:
{{- if .serves }}
    - {name: http, containerPort: 8000}
{{- end }}
    - {name: operations, containerPort: {{ int64 .root.Values.operationsPort }}}
  {{- include "espalier.probes" .values | nindent 2 }}
  resources: {{- toYaml .values.pod.resources | nindent 4 }}
  securityContext: {{- include "espalier.containerSecurity" . | nindent 4 }}
{{- if and .serves .values.endpointDelayS }}
  lifecycle:
    preStop:
      sleep:
        seconds: {{ int64 .values.endpointDelayS }}
{{- end }}
  volumeMounts:
    - name: tmp
      mountPath: /tmp
{{- if .serves }}
    {{- include "espalier.modelMount" . | nindent 4 }}
{{- if .root.Values.gateway.apiKeys.secretName }}
    - name: api-keys
      mountPath: /etc/espalier/api-keys
      readOnly: true
{{- end }}
{{- end }}
{{- end -}}
