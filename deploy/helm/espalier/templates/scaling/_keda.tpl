{{/* The beginning of a ScaledObject: (dict "root" $ "target" (dict "kind" ...) "bounds" (dict "name" ... "minReplicas" ...)) */}}
{{- define "espalier.scaledObject" -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ .bounds.name }}
  labels: {{- include "espalier.labels" (list .root "scaling") | nindent 4 }}
spec:
  scaleTargetRef: {{- toYaml .target | nindent 4 }}
  minReplicaCount: {{ int64 .bounds.minReplicas }}
  maxReplicaCount: {{ int64 .bounds.maxReplicas }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior: {{- include "espalier.slowDown" .root | nindent 8 }}
{{- end -}}

{{/* A metric that is missing is an error, and an error scales nothing. */}}
{{- define "espalier.promTrigger" -}}
type: prometheus
metricType: {{ .metricType }}
metadata:
  serverAddress: {{ .root.Values.scaling.keda.serverAddress | quote }}
  query: {{ .query | quote }}
  threshold: {{ include "espalier.text" .threshold | quote }}
  ignoreNullValues: "false"
{{- end -}}

{{/* Labels of the series of a workload's pods: (list $ "its name"). */}}
{{- define "espalier.series" -}}
{{- printf "namespace=%q,pod=~\"%s-[a-z0-9]+-[a-z0-9]+\"" (index . 0).Release.Namespace (index . 1) -}}
{{- end -}}

{{/* Down slowly, one at a time: what was removed too early has to load again. */}}
{{- define "espalier.slowDown" -}}
scaleDown:
  stabilizationWindowSeconds: 600
  policies:
    - {type: Pods, value: 1, periodSeconds: 60}
{{- end -}}
