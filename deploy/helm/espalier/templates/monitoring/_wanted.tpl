{{/* Whether an object of an API that may be absent is rendered: (list $ "auto" "monitoring.coreos.com/v1/PodMonitor") */}}
{{- define "espalier.wanted" -}}
{{- $enabled := toString (index . 1) -}}
{{- if eq $enabled "auto" -}}
{{- if (index . 0).Capabilities.APIVersions.Has (index . 2) }}yes{{ end -}}
{{- else if eq $enabled "true" -}}
yes
{{- end -}}
{{- end -}}

{{/* A file of deploy/observability, with the objective for TTFT instead of the one it is made with: (list $ path) */}}
{{- define "espalier.withTarget" -}}
{{- (index . 0).Files.Get (index . 1) | replace "2.0" (index . 0).Values.monitoring.ttftTargetS -}}
{{- end -}}
