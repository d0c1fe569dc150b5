{{/* What is scaled, and by what. */}}

{{/* Replicas of the gateway, which KEDA and the HPA scale. */}}
{{- define "espalier.gatewayReplicas" -}}
{{- $scaled := has .Values.scaling.mode (list "keda" "hpa") -}}
{{- include "espalier.replicas" (dict "root" . "kind" "Deployment" "name" (include "espalier.componentName" (list . "gateway")) "scaled" $scaled "replicas" .Values.gateway.replicas) -}}
{{- end -}}

{{/* The targets of KEDA and the HPA as a list of {name, minReplicas, maxReplicas, ssm}; ssm is empty for the gateway. */}}
{{- define "espalier.scaledDeployments" -}}
{{- $targets := list (merge (dict "name" (include "espalier.componentName" (list . "gateway")) "ssm" "") .Values.gateway.scaling) -}}
{{- range $name, $given := .Values.ssms -}}
{{- $ssm := mergeOverwrite (deepCopy $.Values.ssmDefaults) $given -}}
{{- $targets = append $targets (merge (dict "name" (include "espalier.componentName" (list $ "ssm-worker" $name)) "ssm" $name) $ssm.scaling) -}}
{{- end -}}
{{- toJson $targets -}}
{{- end -}}

{{/* A component's `scaling` as the scaler's settings spell it. */}}
{{- define "espalier.scalerLimits" -}}
{{- dict "min_replicas" (int64 .minReplicas) "max_replicas" (int64 .maxReplicas) | toJson -}}
{{- end -}}

{{/* The verifier groups as the scaler's settings spell them. */}}
{{- define "espalier.scaledVerifier" -}}
{{- $target := dict "stateful_set" (include "espalier.componentName" (list . "llm-verifier")) "pods_per_group" (int64 .Values.verifier.pipelineParallelSize) -}}
{{- with .Values.manager.settings.maxBatch }}{{ $_ := set $target "requests_per_replica" (int64 .) }}{{ end -}}
{{- merge $target (include "espalier.scalerLimits" .Values.verifier.scaling | fromJson) | toJson -}}
{{- end -}}

{{/* (list "gateway" .Values.gateway.scaling) */}}
{{- define "espalier.checkScaling" -}}
{{- with index . 1 -}}
{{- if gt (int64 .minReplicas) (int64 .maxReplicas) -}}
{{- fail (printf "%s.scaling.minReplicas: %d exceeds maxReplicas %d" (index $ 0) (int64 .minReplicas) (int64 .maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
