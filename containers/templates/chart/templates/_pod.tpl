{{/* The Host names that a server without keys accepts: the names of its service, localhost for port forwarding, and
allowedHosts. KServe uses other names; with KServe, the list is therefore empty unless allowedHosts is set. */}}
{{- define "canvasrt.hosts" -}}
{{- $name := include "canvasrt.name" . -}}
{{- $own := list "localhost" "127.0.0.1" "$(POD_IP)" $name -}}
{{- range list .Release.Namespace (printf "%s.svc" .Release.Namespace) (printf "%s.svc.cluster.local" .Release.Namespace) -}}
{{- $own = append $own (printf "%s.%s" $name .) -}}
{{- end -}}
{{- if or .Values.allowedHosts (not .Values.kserve.enabled) -}}
{{- join "," (concat $own .Values.allowedHosts) -}}
{{- end -}}
{{- end -}}

{{- define "canvasrt.startupSeconds" -}}
{{- add .Values.startupSeconds (mul .Values.furtherGpuSeconds (sub .Values.gpus 1)) -}}
{{- end -}}

{{/* The pod of a Deployment and of a StatefulSet, and the predictor of a KServe InferenceService. */}}
{{- define "canvasrt.pod" -}}
{{- include "canvasrt.checkProbes" . -}}
{{- include "canvasrt.checkTriton" . -}}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  {{- /* OpenShift chooses a namespace's user and group, and refuses others. */}}
  {{- if not (.Capabilities.APIVersions.Has "security.openshift.io/v1") }}
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  {{- end }}
  seccompProfile:
    type: RuntimeDefault
affinity: {{ include "canvasrt.affinity" . | nindent 2 }}
{{- if .Values.spread.enabled }}
topologySpreadConstraints:
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: {{ $.Values.spread.whenUnsatisfiable }}
    labelSelector:
      matchLabels: {{ include "canvasrt.podLabels" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: {{ if .Values.kserve.enabled }}kserve-container{{ else }}canvasrt{{ end }}
    image: {{ include "canvasrt.image" . }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    {{- $several := and (include "canvasrt.onGpu" .) (gt (int .Values.gpus) 1) }}
    {{- if or .Values.args .Values.triton.open $several }}
    # These arguments replace the image's, which are therefore repeated. If an option occurs twice, the last one wins.
    args:
      - serve
      - --host=0.0.0.0
      - --log=-
      - --exit-timeout=30
      {{- if .Values.triton.open }}
      - --triton-host=0.0.0.0
      {{- if .Values.triton.behindProxy }}
      - --triton-behind-proxy
      {{- end }}
      {{- end }}
      {{- if $several }}
      - --devices=all
      {{- end }}
      {{- with .Values.args }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- end }}
    env:
      - name: NIM_CACHE_PATH
        value: {{ .Values.cache.path | quote }}
      {{- if include "canvasrt.onGpu" . }}
      - name: CUDA_CACHE_PATH
        value: {{ printf "%s/cuda" .Values.cache.path | quote }}
      {{- end }}
      {{- with include "canvasrt.hosts" . }}
      - name: POD_IP
        valueFrom: {fieldRef: {fieldPath: status.podIP}}
      - name: CANVASRT_ALLOWED_HOSTS
        value: {{ . | quote }}
      {{- end }}
      {{- if .Values.apiKeys.existingSecret }}
      - name: CANVASRT_API_KEYS_FILE
        value: /run/secrets/canvasrt/{{ .Values.apiKeys.key }}
      {{- end }}
      {{- with .Values.tls }}
      {{- if .existingSecret }}
      - {name: NIM_SSL_MODE, value: {{ .mode }}}
      - {name: NIM_SSL_CERTS_PATH, value: /run/secrets/tls/{{ .certificate }}}
      - {name: NIM_SSL_KEY_PATH, value: /run/secrets/tls/{{ .key }}}
      {{- if eq .mode "mtls" }}
      - {name: NIM_SSL_CA_CERTS_PATH, value: /run/secrets/tls/{{ .authority }}}
      - {name: NIM_HEALTH_PORT, value: "8003"}
      {{- end }}
      {{- end }}
      {{- end }}
      {{- with .Values.env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    ports:
      - name: {{ if .Values.kserve.enabled }}http1{{ else }}http{{ end }}
        containerPort: 8000
        protocol: TCP
      {{- if and .Values.tls.existingSecret (eq .Values.tls.mode "mtls") }}
      - name: health
        containerPort: 8003
        protocol: TCP
      {{- end }}
      {{- if not .Values.kserve.enabled }}
      {{- if .Values.triton.open }}
      - name: grpc
        containerPort: 8001
        protocol: TCP
      - name: triton
        containerPort: 8080
        protocol: TCP
      {{- end }}
      - name: metrics
        containerPort: 8002
        protocol: TCP
      {{- end }}
    startupProbe:
      {{- include "canvasrt.probe" (dict "root" . "path" "/v1/health/ready") | nindent 6 }}
      periodSeconds: 5
      timeoutSeconds: 8
      failureThreshold: {{ div (add (include "canvasrt.startupSeconds" .) 4) 5 }}
    readinessProbe:
      {{- include "canvasrt.probe" (dict "root" . "path" "/v1/health/ready") | nindent 6 }}
      periodSeconds: 5
      timeoutSeconds: 8
    lifecycle:
      preStop:
        # Stop only after every service has dropped this replica.
        exec: {command: [sleep, "5"]}
    # The server itself replaces a front end that is silent for 10 seconds, and exits if a pass hangs. This probe
    # detects a supervisor that no longer does so.
    livenessProbe:
      {{- include "canvasrt.probe" (dict "root" . "path" "/v1/health/live") | nindent 6 }}
      periodSeconds: 10
      timeoutSeconds: 8
      failureThreshold: 4
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities:
        drop: [ALL]
    resources:
      requests: {{ include "canvasrt.resources" (dict "root" . "resources" .Values.resources.requests) | nindent 8 }}
      limits:
        {{- with .Values.resources.limits }}
        {{- include "canvasrt.resources" (dict "root" $ "resources" .) | nindent 8 }}
        {{- end }}
        {{- if include "canvasrt.onGpu" . }}
        nvidia.com/gpu: {{ .Values.gpus }}
        {{- end }}
    volumeMounts:
      - {name: shm, mountPath: /dev/shm}
      - {name: tmp, mountPath: /tmp}
      - {name: cache, mountPath: {{ .Values.cache.path | quote }}}
      {{- if .Values.apiKeys.existingSecret }}
      - {name: api-keys, mountPath: /run/secrets/canvasrt, readOnly: true}
      {{- end }}
      {{- if .Values.tls.existingSecret }}
      - {name: tls, mountPath: /run/secrets/tls, readOnly: true}
      {{- end }}
volumes:
  - name: shm
    emptyDir:
      medium: Memory
      sizeLimit: {{ .Values.sharedMemory }}
  - name: tmp
    emptyDir:
      sizeLimit: {{ .Values.temporary }}
  {{- if or .Values.kserve.enabled (eq .Values.kind "Deployment") }}
  - name: cache
    emptyDir:
      sizeLimit: {{ .Values.cache.size }}
  {{- end }}
  {{- with .Values.apiKeys.existingSecret }}
  - name: api-keys
    secret:
      secretName: {{ . | quote }}
      defaultMode: 0440
  {{- end }}
  {{- with .Values.tls.existingSecret }}
  - name: tls
    secret:
      secretName: {{ . | quote }}
      defaultMode: 0440
  {{- end }}
{{- end -}}
