{{/* One pod at a time may be evicted, and always one that does not work: the arguments of espalier.selector. */}}
{{- define "espalier.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "espalier.componentName" . }}
  labels: {{- include "espalier.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "espalier.selector" . | nindent 6 }}
{{- end -}}
