{{/* The broker, ours or another. */}}

{{- define "espalier.natsName" -}}
{{ include "espalier.fullname" . }}-nats
{{- end -}}

{{- define "espalier.natsUrl" -}}
{{- if .Values.nats.enabled }}nats://{{ include "espalier.natsName" . }}:4222{{ else }}{{ .Values.nats.url }}{{ end -}}
{{- end -}}

{{/* The Secret with user and password; empty: no authentication. */}}
{{- define "espalier.natsSecret" -}}
{{- with .Values.nats -}}
{{- if .auth.secretName }}{{ .auth.secretName }}{{ else if .enabled }}{{ include "espalier.natsName" $ }}{{ end -}}
{{- end -}}
{{- end -}}
