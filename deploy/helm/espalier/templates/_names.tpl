{{/* Names, labels and images. */}}

{{- define "espalier.fullname" -}}
{{- .Values.fullnameOverride | default .Release.Name -}}
{{- end -}}

{{/* The labels that select a component's pods: (list $ "gateway"), for one SSM's pods (list $ "ssm-worker" name). */}}
{{- define "espalier.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ $root.Chart.Name }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- if eq (len .) 3 }}
espalier-ssm: {{ index . 2 }}
{{- end }}
{{- end -}}

{{/* All labels of an object: the same arguments. */}}
{{- define "espalier.labels" -}}
{{- $root := index . 0 -}}
{{ include "espalier.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: espalier
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- end -}}

{{/* (list $ .Values.images.llmVerifier "cuda"): the variant is what the default tag ends in. */}}
{{- define "espalier.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- $default := $root.Chart.AppVersion -}}
{{- if eq (len .) 3 }}{{ $default = printf "%s-%s" $default (index . 2) }}{{ end -}}
{{- with $root.Values.images.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- $image.repository -}}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default $default }}{{ end -}}
{{- end -}}

{{/* The name of a component's objects: the arguments of espalier.selector. */}}
{{- define "espalier.componentName" -}}
{{- $short := dict "llm-verifier" "verifier" "ssm-worker" "ssm" -}}
{{- $name := printf "%s-%s" (include "espalier.fullname" (index . 0)) (get $short (index . 1) | default (index . 1)) -}}
{{- if eq (len .) 3 }}{{ $name = printf "%s-%s" $name (index . 2) }}{{ end -}}
{{- $name -}}
{{- end -}}
