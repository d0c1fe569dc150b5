{{/* The head of a NetworkPolicy: (dict "root" $ "name" "nats" "components" (list "nats")); no components: all pods. */}}
{{- define "espalier.networkPolicy" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "espalier.fullname" .root }}-{{ .name }}
  labels: {{- include "espalier.labels" (list .root "network") | nindent 4 }}
spec:
  podSelector: {{- include "espalier.podsOf" . | nindent 4 }}
{{- end -}}

{{/* A selector of this release's pods, of these components. */}}
{{- define "espalier.podsOf" -}}
matchLabels:
  app.kubernetes.io/name: {{ .root.Chart.Name }}
  app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .components }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: {{ toJson . }}}
{{- end }}
{{- end -}}
