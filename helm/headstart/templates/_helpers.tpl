{{/* Names. The cap of 30 leaves room for "-<model>" of at most 20: a StatefulSet's name plus its hash is a label. */}}
{{- define "headstart.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 30 | trimSuffix "-" -}}
{{- end -}}

{{- define "headstart.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 30 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "headstart.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 30 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 30 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "headstart.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "headstart.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Labels. The release's own ones select everything of it; a component (and a worker's model) selects one workload. */}}
{{- define "headstart.releaseLabels" -}}
app.kubernetes.io/name: {{ include "headstart.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* (dict "root" $ "component" "gateway" "model" "") */}}
{{- define "headstart.selectorLabels" -}}
{{ include "headstart.releaseLabels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- with .model }}
headstart/model: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* What every object has. Each label stands once: the selector's first, then those of the values.
(dict "root" $ "component" "gateway" "model" "" "labels" {} "annotations" {} "namespace" "") */}}
{{- define "headstart.metadata" -}}
namespace: {{ default .root.Release.Namespace .namespace }}
{{- with merge (dict) (default dict .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
labels:
  {{- $version := dict "app.kubernetes.io/version" .root.Chart.AppVersion "app.kubernetes.io/managed-by" .root.Release.Service }}
  {{- $chart := dict "app.kubernetes.io/part-of" "headstart" "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") }}
  {{- merge (include "headstart.podLabels" . | fromYaml) $version $chart | toYaml | nindent 2 }}
{{- end -}}

{{/* No version among a pod's labels: an upgrade of only the chart must not lose the workers' caches. */}}
{{- define "headstart.podLabels" -}}
{{- merge (include "headstart.selectorLabels" . | fromYaml) (default dict .labels) .root.Values.commonLabels | toYaml -}}
{{- end -}}

{{/* global.imageRegistry goes before a repository that names no registry: a host has a dot or a port, or is localhost.
(dict "root" $ "image" .image "tag" "the tag when none is set") */}}
{{- define "headstart.image" -}}
{{- $repository := .image.repository -}}
{{- with .root.Values.global.imageRegistry -}}
{{- if not (regexMatch "^([^/]*[.:][^/]*|localhost)/" $repository) }}{{ $repository = printf "%s/%s" (trimSuffix "/" .) $repository }}{{ end -}}
{{- end -}}
{{- $reference := list $repository (default .tag .image.tag) | compact | join ":" -}}
{{- if .image.digest -}}
{{- $reference = printf "%s@%s" $reference .image.digest -}}
{{- end -}}
{{- $reference -}}
{{- end -}}

{{/* One model's options: its own entry over the defaults in `worker`. (dict "root" $ "model" $entry) -> YAML */}}
{{- define "headstart.worker" -}}
{{- toYaml (mustMergeOverwrite (deepCopy .root.Values.worker) (deepCopy .model)) -}}
{{- end -}}

{{/* The engines of an entry run elsewhere. */}}
{{- define "headstart.isExternal" -}}
{{- with .external }}{{ if or .urls .service .selector }}true{{ end }}{{ end -}}
{{- end -}}

{{/* The workers of a pod: one, or one for each data-parallel rank of another engine, or of each of several. -> JSON */}}
{{- define "headstart.ranks" -}}
{{- $ranks := list (dict "number" 0 "name" "worker" "port" 8100 "suffix" "") -}}
{{- if ne .engine "headstart" -}}
{{- $engines := 1 -}}
{{- if include "headstart.isExternal" . -}}
{{- $pods := max 1 (int .replicas) -}}
{{- $engines = ternary (div (add (len .external.urls) $pods -1) $pods) (int .external.enginesPerPod) (gt (len .external.urls) 0) -}}
{{- end -}}
{{- range $number := untilStep 1 (mul $engines .vllm.dataParallelSize | int) 1 -}}
{{- $ranks = append $ranks (dict "number" $number "name" (printf "worker-%d" $number) "port" (add 8100 $number) "suffix" (printf ".%d" $number)) -}}
{{- end -}}
{{- end -}}
{{- toJson $ranks -}}
{{- end -}}

{{/* The largest number of workers in a pod. */}}
{{- define "headstart.maxRanks" -}}
{{- $most := 1 -}}
{{- range .Values.models -}}
{{- $worker := include "headstart.worker" (dict "root" $ "model" .) | fromYaml -}}
{{- $most = max $most (include "headstart.ranks" $worker | fromJsonArray | len) -}}
{{- end -}}
{{- $most -}}
{{- end -}}

{{/* The folder of models and downloads, for every process that loads one, or its tokenizer. */}}
{{- define "headstart.models.env" -}}
- name: HF_HOME
  value: /models/huggingface
- name: HF_HUB_OFFLINE
  value: {{ ternary "0" "1" .download | quote }}
- name: HF_HUB_DISABLE_TELEMETRY
  value: "1"
{{- if .huggingFaceToken.existingSecret }}
- name: HF_TOKEN_PATH
  value: /etc/headstart/huggingface/token
{{- end }}
{{- end -}}

{{- define "headstart.models.mounts" -}}
- name: models
  mountPath: /models
  {{- with .volume.subPath }}
  subPath: {{ . }}
  {{- end }}
  {{- if .volume.readOnly }}
  readOnly: true
  {{- end }}
{{- if .huggingFaceToken.existingSecret }}
- name: huggingface-token
  mountPath: /etc/headstart/huggingface
  readOnly: true
{{- end }}
{{- end -}}

{{/* Options of `kvDisk`. The blocks get 9/10 of the volume: a file system takes its part, and a pod
whose emptyDir exceeds its limit is evicted. The folder below the mount is the worker's own; the mount is not. */}}
{{- define "headstart.kv.args" -}}
{{- with .kvDisk.size }}
- --kv-disk=/kv/blocks
- --kv-disk-size={{ div (mul (regexFind "^[0-9]+" .) (index (dict "Mi" 1 "Gi" 1024 "Ti" 1048576) (regexFind "[A-Z]i$" .)) 9) 10 }}M
{{- end }}
{{- end -}}

{{/* (dict "name" "kv" "volume" .kvDisk "selectorLabels" "...") */}}
{{- define "headstart.claimTemplate" -}}
- metadata:
    name: {{ .name }}
    labels:
      {{- .selectorLabels | nindent 6 }}
  spec:
    accessModes: [ReadWriteOnce]
    {{- with .volume.storageClassName }}
    storageClassName: {{ . }}
    {{- end }}
    resources:
      requests:
        storage: {{ .volume.size }}
{{- end -}}

{{/* Without an empty list of claims. */}}
{{- define "headstart.resources" -}}
{{- toYaml (ternary (omit . "claims") . (empty .claims)) -}}
{{- end -}}

{{/* The engine, with its GPUs. */}}
{{- define "headstart.worker.resources" -}}
{{- with .resources.claims }}
claims:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $part := list "requests" "limits" }}
{{ $part }}:
  {{- with index $.resources $part }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if $.gpu.count }}
  {{ $.gpu.resourceName }}: {{ int $.gpu.count }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "headstart.listenHost" -}}
{{- ternary "::" "0.0.0.0" (eq .Values.ipFamily "IPv6") -}}
{{- end -}}

{{- define "headstart.podIP" -}}
{{- ternary "[$(POD_IP)]" "$(POD_IP)" (eq .Values.ipFamily "IPv6") -}}
{{- end -}}

{{/* A security context of the values. Helm removes a key that is null, but not in an entry of `models`. */}}
{{- define "headstart.securityContext" -}}
{{- $kept := dict -}}
{{- range $key, $value := . -}}
{{- if not (kindIs "invalid" $value) }}{{ $_ := set $kept $key $value }}{{ end -}}
{{- end -}}
{{- toYaml $kept -}}
{{- end -}}

{{/* Those of parent charts, then the chart's own. -> JSON */}}
{{- define "headstart.pullSecrets" -}}
{{- concat (default list .Values.global.imagePullSecrets) (default list .Values.imagePullSecrets) | toJson -}}
{{- end -}}

{{/* What every pod has. (dict "root" $ "part" .Values.gateway) */}}
{{- define "headstart.pod" -}}
serviceAccountName: {{ default (include "headstart.serviceAccountName" .root) .part.serviceAccountName }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- if .part.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- with include "headstart.pullSecrets" .root | fromJsonArray }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $key := list "runtimeClassName" "priorityClassName" "schedulerName" }}
{{- with get $.part $key }}
{{ $key }}: {{ . }}
{{- end }}
{{- end }}
{{- with .part.resourceClaims }}
resourceClaims:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- include "headstart.securityContext" .part.podSecurityContext | nindent 2 }}
{{- end -}}

{{/* How often a probe asks, and when it gives up: one of the probes of the values. */}}
{{- define "headstart.timings" -}}
periodSeconds: {{ int .periodSeconds }}
timeoutSeconds: {{ int .timeoutSeconds }}
failureThreshold: {{ int .failureThreshold }}
{{- end -}}

{{/* A startup probe gives up after startupTimeoutSeconds. (dict "probe" ... "worker" ...) */}}
{{- define "headstart.startupTimings" -}}
{{- $most := max 1 (div (int .worker.startupTimeoutSeconds) (int .probe.periodSeconds)) -}}
{{- include "headstart.timings" (merge (dict "failureThreshold" $most) .probe) -}}
{{- end -}}

{{/* The limit of a `podDisruptionBudget`. */}}
{{- define "headstart.budget" -}}
{{- if .minAvailable -}}
minAvailable: {{ .minAvailable }}
{{- else -}}
maxUnavailable: {{ .maxUnavailable }}
{{- end -}}
{{- end -}}

{{/* Soft spreading over nodes and zones by default. (dict "constraints" ... "labels" ...) */}}
{{- define "headstart.topologySpread" -}}
{{- if .constraints -}}
{{- range .constraints }}
- {{ toYaml (merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" (fromYaml $.labels)))) | nindent 2 | trim }}
{{- end -}}
{{- else -}}
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
- topologyKey: {{ . }}
  maxSkew: 1
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- $.labels | nindent 6 }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Every image has Python; not every image has a shell, nor every cluster the sleep action. */}}
{{- define "headstart.preStop" -}}
preStop:
  exec:
    command: ["python3", "-I", "-S", "-c", "import time; time.sleep({{ int . }})"]
{{- end -}}

{{/* SIGTERM comes after preStop. (dict "drain" ... "after" "seconds for what a process does after its drain") */}}
{{- define "headstart.gracePeriod" -}}
{{- add (int .drain.preStopSeconds) (int .drain.noticeSeconds) (int .drain.timeoutSeconds) .after -}}
{{- end -}}

{{- define "headstart.clusterSecretName" -}}
{{- default (printf "%s-cluster" (include "headstart.fullname" .)) .Values.clusterSecret.existingSecret -}}
{{- end -}}

{{- define "headstart.apiKeysSecretName" -}}
{{- default (printf "%s-api-keys" (include "headstart.fullname" .)) .Values.apiKeys.existingSecret -}}
{{- end -}}

{{/* The value in the Secret of an earlier install, else a new one. (dict "root" $ "secret" ... "key" ... "prefix" "") */}}
{{- define "headstart.generated" -}}
{{- $old := lookup "v1" "Secret" .root.Release.Namespace .secret -}}
{{- if and $old (hasKey (default dict $old.data) .key) -}}
{{- index $old.data .key -}}
{{- else -}}
{{- printf "%s%s" (default "" .prefix) (randAlphaNum 48) | b64enc -}}
{{- end -}}
{{- end -}}

{{- /* The names that gateways' ops ports answer to: those of their Service. Options may add some. */ -}}
{{- define "headstart.opsHosts" -}}
{{- $name := printf "%s-gateway-ops" (include "headstart.fullname" .) -}}
{{- $space := .Release.Namespace -}}
{{- $names := list $name (printf "%s.%s" $name $space) (printf "%s.%s.svc" $name $space) (printf "%s.%s.svc.cluster.local" $name $space) -}}
{{- join "," (concat $names (compact (list .Values.tls.gateway.name))) -}}
{{- end -}}

{{- define "headstart.opsKeySecretName" -}}
{{- default (printf "%s-ops" (include "headstart.fullname" .)) .Values.opsKey.existingSecret -}}
{{- end -}}

{{/* Options of the values as arguments: a list is an option given several times, `true` a flag, null no argument. */}}
{{- define "headstart.options" -}}
{{- range $name, $value := . }}
{{- range (kindIs "slice" $value | ternary $value (list $value)) }}
{{- if kindIs "bool" . }}
{{- if . }}
- --{{ $name }}
{{- end }}
{{- else if not (kindIs "invalid" .) }}
- {{ printf "--%s=%s" $name (kindIs "string" . | ternary . (toJson .)) | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "headstart.tracing.args" }}
{{- with .Values.tracing.endpoint }}
- {{ printf "--otlp-endpoint=%s" . | quote }}
{{- end }}
{{- end -}}

{{/* TLS of a port. (dict "tls" .Values.tls.gateway) */}}
{{- define "headstart.tls.scheme" -}}
{{- ternary "https" "http" (ne .tls.secret "") -}}
{{- end -}}

{{- define "headstart.tls.args" -}}
{{- if .tls.secret }}
- --tls-cert=/etc/headstart/tls/tls.crt
- --tls-key=/etc/headstart/tls/tls.key
{{- end }}
{{- end -}}

{{/* For callers of workers: gateways, and workers that fetch blocks. */}}
{{- define "headstart.workerCa.args" -}}
{{- with .Values.tls.workers }}
{{- if .secret }}
- --worker-ca=/etc/headstart/worker-ca/ca.crt
- --worker-tls-name={{ .name }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "headstart.workerCa.volumeMount" -}}
{{- if .Values.tls.workers.secret }}
- name: worker-ca
  mountPath: /etc/headstart/worker-ca
  readOnly: true
{{- end }}
{{- end -}}

{{- define "headstart.workerCa.volume" -}}
{{- with .Values.tls.workers.secret }}
- name: worker-ca
  secret:
    secretName: {{ . }}
    items:
      - key: {{ $.Values.tls.workers.caKey }}
        path: ca.crt
{{- end }}
{{- end -}}

{{/* The kubelet probes over TLS too, and checks no certificate. */}}
{{- define "headstart.tls.probe" -}}
{{- if .tls.secret }}
scheme: HTTPS
{{- end }}
{{- end -}}

{{- define "headstart.tls.volumeMount" -}}
{{- if .tls.secret }}
- name: tls
  mountPath: /etc/headstart/tls
  readOnly: true
{{- end }}
{{- end -}}

{{- define "headstart.tls.volume" -}}
{{- with .tls.secret }}
- name: tls
  secret:
    secretName: {{ . }}
    items:
      - key: tls.crt
        path: tls.crt
      - key: tls.key
        path: tls.key
{{- end }}
{{- end -}}

{{/* How Prometheus checks a port's certificate. */}}
{{- define "headstart.tls.endpoint" -}}
{{- if .tls.secret }}
scheme: https
tlsConfig:
  serverName: {{ .tls.name }}
  {{- with .tls.caKey }}
  ca:
    secret:
      name: {{ $.tls.secret }}
      key: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Egress to the collector of traces: by its port, as its address is a name. */}}
{{- define "headstart.tracing.egress" -}}
{{- with .Values.tracing.endpoint }}
{{- $url := urlParse . }}
- ports:
    - protocol: TCP
      port: {{ regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host) | default (ternary "443" "80" (eq $url.scheme "https")) }}
{{- end }}
{{- end -}}

{{- define "headstart.dnsEgress" -}}
- ports:
    - protocol: UDP
      port: 53
    - protocol: TCP
      port: 53
{{- end -}}

{{/* The hosts of the Ingress, each with its path. -> JSON */}}
{{- define "headstart.ingressRules" -}}
{{- $rules := list -}}
{{- range .Values.gateway.ingress.hosts -}}
{{- $host := kindIs "string" . | ternary (dict "host" .) . -}}
{{- $rules = append $rules (merge (dict) $host (dict "path" "/v1" "pathType" "Prefix")) -}}
{{- end -}}
{{- toJson $rules -}}
{{- end -}}
