{{/* The pod of a Deployment and of a StatefulSet, and the predictor of a KServe InferenceService. */}}
{{- define "canvasrt.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  seccompProfile:
    type: RuntimeDefault
affinity: {{ include "canvasrt.affinity" . | nindent 2 }}
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
    {{- with .Values.args }}
    # These replace the image's own arguments, so they repeat them. If an option is repeated, the last one wins.
    args:
      - serve
      - --host=0.0.0.0
      - --log=-
      - --exit-timeout=30
      {{- toYaml . | nindent 6 }}
    {{- end }}
    env:
      - name: NIM_CACHE_PATH
        value: {{ .Values.cache.path }}
      {{- if .Values.apiKeys.existingSecret }}
      - name: CANVASRT_API_KEYS_FILE
        value: /run/secrets/canvasrt/{{ .Values.apiKeys.key }}
      {{- end }}
      {{- with .Values.env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    ports:
      - name: {{ if .Values.kserve.enabled }}http1{{ else }}http{{ end }}
        containerPort: 8000
        protocol: TCP
      {{- if not .Values.kserve.enabled }}
      - name: grpc
        containerPort: 8001
        protocol: TCP
      - name: triton
        containerPort: 8080
        protocol: TCP
      - name: metrics
        containerPort: 8002
        protocol: TCP
      {{- end }}
    startupProbe:
      httpGet: {path: /v1/health/ready, port: 8000}
      periodSeconds: 5
      failureThreshold: {{ div .Values.startupSeconds 5 }}
    readinessProbe:
      httpGet: {path: /v1/health/ready, port: 8000}
      periodSeconds: 5
      timeoutSeconds: 5
    lifecycle:
      preStop:
        # Stop only after every service has dropped this replica.
        exec: {command: [sleep, "5"]}
    livenessProbe:
      httpGet: {path: /v1/health/live, port: 8000}
      periodSeconds: 10
      timeoutSeconds: 5
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities:
        drop: [ALL]
    resources:
      requests: {{ toYaml .Values.resources.requests | nindent 8 }}
      limits:
        {{- with .Values.resources.limits }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- if include "canvasrt.onGpu" . }}
        nvidia.com/gpu: {{ .Values.gpus }}
        {{- end }}
    volumeMounts:
      - {name: shm, mountPath: /dev/shm}
      - {name: tmp, mountPath: /tmp}
      - {name: cache, mountPath: {{ .Values.cache.path }}}
      {{- if .Values.apiKeys.existingSecret }}
      - {name: api-keys, mountPath: /run/secrets/canvasrt, readOnly: true}
      {{- end }}
volumes:
  - name: shm
    emptyDir:
      medium: Memory
      sizeLimit: {{ .Values.sharedMemory }}
  - name: tmp
    emptyDir: {}
  {{- if or .Values.kserve.enabled (eq .Values.kind "Deployment") }}
  - name: cache
    emptyDir:
      sizeLimit: {{ .Values.cache.size }}
  {{- end }}
  {{- with .Values.apiKeys.existingSecret }}
  - name: api-keys
    secret:
      secretName: {{ . }}
      defaultMode: 0440
  {{- end }}
{{- end -}}
