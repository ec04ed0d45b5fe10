{{/* A label of a StatefulSet's pods has the StatefulSet's name plus 11 characters, and labels have at most 63. */}}
{{- define "canvasrt.name" -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "canvasrt.selector" -}}
app.kubernetes.io/name: canvasrt
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "canvasrt.labels" -}}
{{ include "canvasrt.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
canvasrt/target: {{ .Values.target }}
{{- end -}}

{{- define "canvasrt.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "canvasrt.onGpu" -}}
{{- if .Values.node.capability }}true{{ end -}}
{{- end -}}

{{/* There may be no spare GPU for a new replica, so the old one makes room first. */}}
{{- define "canvasrt.strategy" -}}
type: RollingUpdate
rollingUpdate:
  maxSurge: {{ ternary 0 1 (eq (include "canvasrt.onGpu" .) "true") }}
  maxUnavailable: {{ ternary 1 0 (eq (include "canvasrt.onGpu" .) "true") }}
{{- end -}}

{{/* Resources with the memory of all GPUs. */}}
{{- define "canvasrt.resources" -}}
{{- $memory := .resources.memory | toString -}}
{{- if and (include "canvasrt.onGpu" .root) (regexMatch "^[1-9][0-9]*Gi$" $memory) -}}
{{- $further := mul .root.Values.furtherGpuGi (sub .root.Values.gpus 1) -}}
{{- toYaml (merge (dict "memory" (printf "%dGi" (add (trimSuffix "Gi" $memory) $further))) .resources) -}}
{{- else -}}
{{- toYaml .resources -}}
{{- end -}}
{{- end -}}

{{- define "canvasrt.affinity" -}}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
      {{- range splitList ", " .Values.node.capability }}
      - matchExpressions:
          - key: kubernetes.io/arch
            operator: In
            values: [{{ $.Values.node.arch }}]
          {{- with . }}
          # Set by NVIDIA's GPU feature discovery.
          - key: nvidia.com/gpu.compute.major
            operator: In
            values: [{{ index (splitList "." .) 0 | quote }}]
          - key: nvidia.com/gpu.compute.minor
            operator: In
            values: [{{ index (splitList "." .) 1 | quote }}]
          {{- end }}
          {{- if $.Values.node.memoryMiB }}
          - key: nvidia.com/gpu.memory
            operator: Gt
            values: [{{ $.Values.node.memoryMiB | int64 | toString | quote }}]
          {{- end }}
      {{- end }}
{{- end -}}

{{/* The labels by which pods are selected; KServe sets other labels. */}}
{{- define "canvasrt.podLabels" -}}
{{- if .Values.kserve.enabled -}}
serving.kserve.io/inferenceservice: {{ include "canvasrt.name" . | quote }}
{{- else -}}
{{ include "canvasrt.selector" . }}
{{- end -}}
{{- end -}}

{{/* What a probe calls. A kubelet accepts any server certificate, but has no client certificate for mutual TLS. */}}
{{- define "canvasrt.probe" -}}
{{- $root := .root -}}
{{- $secret := $root.Values.tls.existingSecret -}}
{{- if and $secret (eq $root.Values.tls.mode "mtls") -}}
httpGet: {path: {{ .path }}, port: 8003}
{{- else if $secret -}}
httpGet: {path: {{ .path }}, port: 8000, scheme: HTTPS}
{{- else -}}
httpGet: {path: {{ .path }}, port: 8000}
{{- end -}}
{{- end -}}

{{/* Probes would not use a port or TLS that is set in `env` or `args`. */}}
{{- define "canvasrt.checkProbes" -}}
{{- $port := "the server's port inside the pod is 8000, which service and probes use" -}}
{{- $hint := "set tls.existingSecret to a secret with the certificate instead, so that probes use TLS, too" -}}
{{- range .Values.env -}}
{{- if hasPrefix "NIM_SSL_" .name }}{{ fail (printf "env sets %s; %s" .name $hint) }}{{ end -}}
{{- if has .name (list "NIM_SERVER_PORT" "NIM_HTTP_API_PORT") }}{{ fail (printf "env sets %s: %s" .name $port) }}{{ end -}}
{{- end -}}
{{- range .Values.args -}}
{{- if hasPrefix "--ssl-" . }}{{ fail (printf "args sets %s; %s" . $hint) }}{{ end -}}
{{- if hasPrefix "--port" . }}{{ fail (printf "args sets %s: %s" . $port) }}{{ end -}}
{{- end -}}
{{- if and .Values.tls.existingSecret .Values.kserve.enabled -}}
{{- fail "tls.existingSecret is set with kserve.enabled: leave it out, and terminate TLS at KServe's gateway" -}}
{{- end -}}
{{- end -}}

{{/* Triton's own ports have no TLS. */}}
{{- define "canvasrt.checkTriton" -}}
{{- if and .Values.triton.open .Values.tls.existingSecret (not .Values.triton.behindProxy) -}}
{{- fail "triton.open would let callers bypass tls: set it to false, or set triton.behindProxy if a proxy authenticates the callers of ports 8001 and 8080" -}}
{{- end -}}
{{- end -}}
