{{/* The pods of verifier groups: one for each stage, with the stage's tensor-parallel ranks.
     (dict "root" $ "generation" "the label that has the revision's hash" "service" "its headless Service, or empty") */}}

{{- define "espalier.verifierPod" -}}
{{- $root := .root -}}
{{- $verifier := $root.Values.verifier -}}
{{- $ranks := mul (int64 $verifier.tensorParallelSize) (int64 $verifier.pipelineParallelSize) -}}
{{- $image := include "espalier.image" (list $root $root.Values.images.llmVerifier $verifier.device) -}}
{{- $resources := deepCopy $verifier.pod.resources -}}
{{- if eq $verifier.device "cuda" -}}
{{- $_ := set $resources.limits $verifier.gpuResource (int64 $verifier.tensorParallelSize) -}}
{{- end -}}
metadata:
  labels: {{- include "espalier.selector" (list $root "llm-verifier") | nindent 4 }}
{{- if eq $root.Values.model.source "fetch" }}
    espalier-fetches: "true"
{{- end }}
  annotations: {{- include "espalier.podAnnotations" (dict "root" $root "pod" $verifier.pod) | nindent 4 }}
spec:
  {{- include "espalier.podFields" (dict "root" $root "pod" $verifier.pod "selector" (list $root "llm-verifier")) | nindent 2 }}
  terminationGracePeriodSeconds: {{ int64 $verifier.gracePeriodS }}
{{- if eq $root.Values.model.source "fetch" }}
  initContainers:
    {{- include "espalier.fetchContainer" (dict "root" $root "volume" "models" "image" $image "fetch" $root.Values.model.fetch "patterns" (include "espalier.weightPatterns" $root | fromJsonArray)) | nindent 4 }}
{{- end }}
  containers:
    - name: llm-verifier
      image: {{ $image }}
      imagePullPolicy: {{ $root.Values.images.pullPolicy }}
      command: [python, -m, llm_verifier]
      env:
        - name: ESPALIER_NAME
          value: {{ $root.Values.model.name | quote }}
        - name: ESPALIER_MODEL
          value: {{ include "espalier.llmDir" $root }}
        - name: ESPALIER_DEVICE
          value: {{ $verifier.device }}
{{- if gt $ranks 1 }}
        - name: ESPALIER_TENSOR_PARALLEL_SIZE
          value: {{ int64 $verifier.tensorParallelSize | quote }}
        - name: ESPALIER_PIPELINE_PARALLEL_SIZE
          value: {{ int64 $verifier.pipelineParallelSize | quote }}
        - name: ESPALIER_RANKS_PER_POD
          value: {{ int64 $verifier.tensorParallelSize | quote }}
        - name: ESPALIER_GROUP_PORT
          value: "7800"
        # In a roll-out old and new pods form no group.
        - name: ESPALIER_GROUP_GENERATION
          valueFrom:
            fieldRef: {fieldPath: "metadata.labels['{{ .generation }}']"}
{{- with .service }}
        - name: ESPALIER_GROUP_SERVICE
          value: {{ . }}
{{- end }}
{{- end }}
        - name: OMP_NUM_THREADS
          valueFrom:
            resourceFieldRef: {containerName: llm-verifier, resource: limits.cpu}
{{- with include "espalier.settings" (dict "prefix" "ESPALIER_" "settings" $verifier.settings) }}{{ trim . | nindent 8 }}{{ end }}
{{- with include "espalier.serviceEnv" (dict "root" $root "pod" $verifier.pod) }}{{ trim . | nindent 8 }}{{ end }}
      ports:
        - {name: operations, containerPort: {{ int64 $root.Values.operationsPort }}}
      {{- include "espalier.probes" $verifier | nindent 6 }}
      resources: {{- toYaml $resources | nindent 8 }}
      securityContext: {{- include "espalier.containerSecurity" $root | nindent 8 }}
      volumeMounts:
        - name: tmp
          mountPath: /tmp
        {{- include "espalier.modelMount" $root | nindent 8 }}
{{- if gt (int64 $verifier.tensorParallelSize) 1 }}
        - name: shm
          mountPath: /dev/shm
{{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 4Gi}
{{- if gt (int64 $verifier.tensorParallelSize) 1 }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $verifier.shmSize }}}
{{- end }}
{{- if ne $root.Values.model.source "fetch" }}
    {{- include "espalier.modelVolume" (dict "root" $root) | nindent 4 }}
{{- else if $verifier.leaderWorkerSet.enabled }}
    - name: models
      ephemeral:
        volumeClaimTemplate:
          spec: {{- include "espalier.modelClaim" $root | nindent 12 }}
{{- end }}
{{- end -}}
