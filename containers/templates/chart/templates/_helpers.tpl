{{- define "canvasrt.name" -}}
{{- .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- end -}}

{{- define "canvasrt.selector" -}}
app.kubernetes.io/name: canvasrt
app.kubernetes.io/instance: {{ .Release.Name }}
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

{{- define "canvasrt.affinity" -}}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
      - matchExpressions:
          - key: kubernetes.io/arch
            operator: In
            values: [{{ .Values.node.arch }}]
          {{- with .Values.node.capability }}
          # Set by NVIDIA's GPU feature discovery.
          - key: nvidia.com/gpu.compute.major
            operator: In
            values: [{{ index (splitList "." .) 0 | quote }}]
          - key: nvidia.com/gpu.compute.minor
            operator: In
            values: [{{ index (splitList "." .) 1 | quote }}]
          {{- end }}
          {{- if .Values.node.memoryMiB }}
          - key: nvidia.com/gpu.memory
            operator: Gt
            values: [{{ .Values.node.memoryMiB | int64 | toString | quote }}]
          {{- end }}
{{- end -}}
