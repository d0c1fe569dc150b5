{{/* Where the LLM and the SSMs lie, and how they get there. */}}

{{/* The directory, in a volume at `at`, that an init container fetches to: (list "/models" .Values.model.fetch) */}}
{{- define "espalier.fetchedDir" -}}
{{- $fetch := index . 1 -}}
{{- printf "%s/%s--%s" (index . 0) (replace "/" "--" $fetch.repository) (replace "/" "--" $fetch.revision) -}}
{{- end -}}

{{/* A path in the LLM's volume. */}}
{{- define "espalier.volumePath" -}}
{{- clean (printf "/models/%s" .) -}}
{{- end -}}

{{- define "espalier.llmDir" -}}
{{- with .Values.model -}}
{{- if eq .source "fetch" }}{{ include "espalier.fetchedDir" (list "/models" .fetch) }}{{ else }}{{ include "espalier.volumePath" .path }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* The volume at /models: (dict "root" $ "cacheSize" "1Gi"); what is fetched lies on the node's disk. */}}
{{- define "espalier.modelVolume" -}}
{{- $model := .root.Values.model -}}
- name: models
{{- if eq $model.source "pvc" }}
  persistentVolumeClaim:
    claimName: {{ $model.pvc.claimName }}
    readOnly: true
{{- else if eq $model.source "hostPath" }}
  hostPath:
    path: {{ $model.hostPath.path }}
    type: Directory
{{- else }}
  emptyDir:
    sizeLimit: {{ .cacheSize }}
{{- end }}
{{- end -}}

{{- define "espalier.modelMount" -}}
- name: models
  mountPath: /models
  readOnly: true
{{- end -}}

{{/* The claim of what is fetched, of a verifier pod. */}}
{{- define "espalier.modelClaim" -}}
accessModes: [ReadWriteOnce]
{{- with .Values.model.fetch.volume }}
{{- if not (kindIs "invalid" .storageClassName) }}
storageClassName: {{ .storageClassName | quote }}
{{- end }}
resources:
  requests:
    storage: {{ .size }}
{{- end }}
{{- end -}}

{{/* An init container that fetches, once, into volume models or ssm, which lies at /models or /ssm: (dict "root" $ "volume" "models"
     "image" "..." "fetch" (dict "repository" ... "revision" ...) "patterns" (list ...)) */}}
{{- define "espalier.fetchContainer" -}}
{{- $fetch := .root.Values.model.fetch -}}
{{- $at := printf "/%s" .volume -}}
- name: fetch-{{ .volume }}
  image: {{ .image }}
  imagePullPolicy: {{ .root.Values.images.pullPolicy }}
  command: [python, -c, {{ .root.Files.Get "files/fetch_model.py" | toJson }}]
  args: {{ concat (list .fetch.repository .fetch.revision (include "espalier.fetchedDir" (list $at .fetch))) .patterns | toJson }}
  env:
    - name: HF_HOME
      value: /tmp/hub
    - name: HF_XET_CHUNK_CACHE_SIZE_BYTES
      value: "0"
{{- with $fetch.token.secretName }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef: {name: {{ . }}, key: {{ $fetch.token.key }}}
{{- end }}
{{- with include "espalier.env" $fetch.env }}{{ trim . | nindent 4 }}{{ end }}
  resources: {{- toYaml $fetch.resources | nindent 4 }}
  securityContext: {{- include "espalier.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - name: {{ .volume }}
      mountPath: {{ $at }}
    - name: tmp
      mountPath: /tmp
{{- end -}}

{{/* Which files of a model are needed: weights and all, or what tokenizers and templates are made of. */}}
{{- define "espalier.weightPatterns" -}}
["*.safetensors", "*.json", "*.jinja"]
{{- end -}}
{{- define "espalier.tokenizerPatterns" -}}
["*.json", "*.jinja"]
{{- end -}}

{{/* Whether any pod fetches. */}}
{{- define "espalier.anyFetch" -}}
{{- if eq .Values.model.source "fetch" }}yes{{ end -}}
{{- range .Values.ssms }}{{ with .fetch }}{{ if .repository }}yes{{ end }}{{ end }}{{ end -}}
{{- end -}}
