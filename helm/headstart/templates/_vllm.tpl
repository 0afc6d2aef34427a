{{/* A pod of `engine: vllm`: the engine on the loopback address, and a worker for each of its data-parallel ranks in
front of it. The engine's ports: 8000 API, 5557 and up cache events, 5657 and up their replay; vLLM adds the rank. */}}

{{/* A native sidecar: it starts before the workers, and stops when the last of them has drained and ended.
(dict "root" $ "worker" ... "source" ... "servedName" ...) */}}
{{- define "headstart.vllm.engine" -}}
{{- $vllm := .worker.vllm -}}
{{- $events := dict "enable_kv_cache_events" true "publisher" "zmq" "endpoint" "tcp://127.0.0.1:5557" "replay_endpoint" "tcp://127.0.0.1:5657" -}}
- name: engine
  image: {{ include "headstart.image" (dict "root" .root "image" $vllm.image "tag" "") }}
  imagePullPolicy: {{ $vllm.image.pullPolicy }}
  restartPolicy: Always
  securityContext:
    {{- include "headstart.securityContext" .worker.securityContext | nindent 4 }}
  {{- if $vllm.apiKey.existingSecret }}
  # vLLM reads no key from a file.
  command:
    - python3
    - -I
    - -c
    - |
      import os, sys
      with open("/etc/headstart/engine/key") as file:
          os.environ["VLLM_API_KEY"] = file.read().strip()
      os.execvp("vllm", ["vllm", "serve", *sys.argv[1:]])
  {{- else }}
  command: [vllm, serve]
  {{- end }}
  args:
    - {{ .source | quote }}
    - {{ printf "--served-model-name=%s" .servedName | quote }}
    - --host=127.0.0.1
    - --port=8000
    - --enable-scale-out
    - --enable-prefix-caching
    - --enable-prompt-tokens-details
    - {{ printf "--kv-events-config=%s" (toJson $events) | squote }}
    - --tensor-parallel-size={{ int $vllm.tensorParallelSize }}
    - --pipeline-parallel-size={{ int $vllm.pipelineParallelSize }}
    {{- if gt (int $vllm.dataParallelSize) 1 }}
    - --data-parallel-size={{ int $vllm.dataParallelSize }}
    # Several API servers would share their counts, and give no start time.
    - --api-server-count=1
    {{- end }}
    {{- with $vllm.extraArgs }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  env:
    - name: HOME
      value: /tmp
    # The image has no entry for the pod's uid, and torch asks for a name.
    - name: USER
      value: headstart
    - name: VLLM_HOST_IP
      value: 127.0.0.1
    - name: VLLM_NO_USAGE_STATS
      value: "1"
    {{- if $vllm.devMode }}
    - name: VLLM_SERVER_DEV_MODE
      value: "1"
    {{- end }}
    {{- include "headstart.models.env" .worker | nindent 4 }}
    {{- with $vllm.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $vllm.extraEnvFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  # The kubelet probes the pod's address, where nothing listens, so these run in the container.
  startupProbe:
    {{- include "headstart.vllm.probe" . | nindent 4 }}
    {{- include "headstart.startupTimings" (dict "probe" $vllm.startupProbe "worker" .worker) | nindent 4 }}
  readinessProbe:
    {{- include "headstart.vllm.probe" . | nindent 4 }}
    {{- include "headstart.timings" $vllm.readinessProbe | nindent 4 }}
  livenessProbe:
    {{- include "headstart.vllm.probe" . | nindent 4 }}
    {{- include "headstart.timings" $vllm.livenessProbe | nindent 4 }}
  resources:
    {{- include "headstart.worker.resources" .worker | nindent 4 }}
  volumeMounts:
    - name: engine-tmp
      mountPath: /tmp
    - name: shm
      mountPath: /dev/shm
    {{- include "headstart.models.mounts" .worker | nindent 4 }}
    {{- include "headstart.vllm.keyMount" .worker | nindent 4 }}
    {{- with $vllm.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "headstart.vllm.probe" -}}
exec:
  command:
    - python3
    - -I
    - -S
    - -c
    - import urllib.request as r; r.build_opener(r.ProxyHandler({})).open("http://127.0.0.1:8000/health", timeout=5)
{{- end -}}

{{/* For engines of `external`: each worker takes one of them that no other of the pod has, and adds --engine-url.
(dict "root" $ "worker" ... "name" "the Service of the entry") */}}
{{- define "headstart.external.command" -}}
{{- $external := .worker.external -}}
- python3
- -I
- -c
- |
  {{- .root.Files.Get "files/choose_engine.py" | nindent 2 }}
- $(POD_NAME)
- {{ int .worker.replicas | quote }}
- {{ int .worker.vllm.dataParallelSize | quote }}
{{- range $external.urls }}
- {{ . | quote }}
{{- end }}
{{- if or $external.service $external.selector }}
- dns:{{ default (printf "%s-engines" .name) $external.service }}:{{ int $external.port }}
{{- end }}
- "--"
- headstart
- worker
{{- end -}}

{{/* Their API, and their events. */}}
{{- define "headstart.external.egress" -}}
{{- $ports := list -}}
{{- range .urls }}{{ $url := urlParse . }}{{ $ports = append $ports (regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host) | default (ternary "443" "80" (eq $url.scheme "https")) | int) }}{{ end -}}
{{- if not .urls }}{{ $ports = list (int .port) }}{{ end -}}
{{- if eq .events "auto" }}{{ range .eventPorts }}{{ $ports = append $ports (int .) }}{{ end }}{{ end -}}
- ports:
    {{- range uniq $ports }}
    - protocol: TCP
      port: {{ . }}
    {{- end }}
  {{- with .selector }}
  to:
    - podSelector:
        matchLabels:
          {{- toYaml . | nindent 10 }}
  {{- end }}
{{- end -}}

{{- define "headstart.external.args" -}}
- --engine={{ .worker.engine }}
{{- with .source }}
- {{ printf "--tokenizer=%s" . | quote }}
{{- end }}
- --events={{ .worker.external.events }}
- --events-exposed
{{- if .worker.vllm.apiKey.existingSecret }}
- --engine-key-file=/etc/headstart/engine/key
{{- end }}
{{- end -}}

{{/* (dict "worker" ... "rank" ...) */}}
{{- define "headstart.vllm.workerArgs" -}}
- --engine=vllm
- --engine-url=http://127.0.0.1:8000
{{- if gt (int .worker.vllm.dataParallelSize) 1 }}
- --engine-rank={{ int .rank.number }}
{{- end }}
- --events=tcp://127.0.0.1:{{ add 5557 .rank.number }}
- --events-replay=tcp://127.0.0.1:{{ add 5657 .rank.number }}
{{- if .worker.vllm.apiKey.existingSecret }}
- --engine-key-file=/etc/headstart/engine/key
{{- end }}
{{- end -}}

{{- define "headstart.vllm.keyMount" -}}
{{- if .vllm.apiKey.existingSecret }}
- name: engine-key
  mountPath: /etc/headstart/engine
  readOnly: true
{{- end }}
{{- end -}}

{{- define "headstart.vllm.keyVolume" -}}
{{- with .vllm.apiKey.existingSecret }}
- name: engine-key
  secret:
    secretName: {{ . }}
    items:
      - key: {{ $.vllm.apiKey.key }}
        path: key
{{- end }}
{{- end -}}

{{/* Prometheus cannot reach the engine's port, so this relays its metrics, and nothing else.
(dict "root" $ "worker" ...) */}}
{{- define "headstart.vllm.metrics" -}}
{{- $values := .root.Values -}}
- name: engine-metrics
  image: {{ include "headstart.image" (dict "root" .root "image" $values.gateway.image "tag" .root.Chart.AppVersion) }}
  imagePullPolicy: {{ $values.gateway.image.pullPolicy }}
  restartPolicy: Always
  securityContext:
    {{- include "headstart.securityContext" .worker.securityContext | nindent 4 }}
  command: [python3, -I, -c]
  args:
    - |
      {{- .root.Files.Get "files/engine_metrics.py" | nindent 6 }}
    - {{ include "headstart.listenHost" .root | quote }}
    - "8090"
    - http://127.0.0.1:8000/metrics
  ports:
    - name: engine-metrics
      containerPort: 8090
  {{- range list "startupProbe" "readinessProbe" "livenessProbe" }}
  {{ . }}:
    httpGet:
      path: /health
      port: engine-metrics
      {{- include "headstart.tls.probe" (dict "tls" $values.tls.workers) | nindent 6 }}
    periodSeconds: 10
    timeoutSeconds: 6
    failureThreshold: 6
  {{- end }}
  resources:
    requests:
      cpu: 20m
      memory: 32Mi
    limits:
      memory: 128Mi
  {{- if $values.tls.workers.secret }}
  volumeMounts:
    {{- include "headstart.tls.volumeMount" (dict "tls" $values.tls.workers) | nindent 4 }}
  {{- end }}
{{- end -}}
