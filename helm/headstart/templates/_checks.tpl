{{/* Checks that a schema cannot express: relations between values. Each message names the key. */}}
{{- define "headstart.checks" -}}
{{- include "headstart.checkNames" . -}}
{{- $names := list -}}
{{- $sources := dict -}}
{{- $ownEngine := (include "headstart.names" . | fromJson).ownEngine -}}
{{- range .Values.models -}}
{{- $name := .name -}}
{{- if has .name $names }}{{ fail (printf "models: the name %q stands twice" .name) }}{{ end -}}
{{- if has .name (list "gateway" "gateway-ops" "redis" "cluster" "api-keys" "test") }}{{ fail (printf "models: the name %q is taken by a part of the chart" .name) }}{{ end -}}
{{- $names = append $names .name -}}
{{- $worker := include "headstart.worker" (dict "root" $ "model" .) | fromYaml -}}
{{- if and (not .source) (not (include "headstart.isExternal" $worker)) }}{{ fail (printf "models.%s.source: name the model, or engines that run already in external" .name) }}{{ end -}}
{{- if contains ":" (default "" .source) -}}
{{- fail (printf "models.%s.source: workers load nothing from %s; name a Hugging Face id, or a path under /models in a volume (existingClaim, hostPath or image)" .name .source) -}}
{{- end -}}
{{- with $worker.volume -}}
{{- if gt (compact (list .existingClaim .hostPath .image (toString .size)) | len) 1 -}}
{{- fail (printf "models.%s.volume: existingClaim, hostPath, image and size exclude each other" $name) -}}
{{- end -}}
{{- if and .readOnly (not .existingClaim) (not .hostPath) -}}
{{- fail (printf "models.%s.volume.readOnly: only an existingClaim or a hostPath can be read only, because nothing could fill a new volume" $name) -}}
{{- end -}}
{{- if and (or .readOnly .image) $worker.download -}}
{{- fail (printf "models.%s.download: the volume is read only; set download: false" $name) -}}
{{- end -}}
{{- end -}}
{{- if $worker.hostNetwork -}}
{{- include "headstart.checkHostNetwork" (dict "root" $ "key" (printf "models.%s" .name)) -}}
{{- if eq $worker.engine "vllm" }}{{ if not (include "headstart.isExternal" $worker) }}{{ fail (printf "models.%s.hostNetwork: the ports of vLLM, with every prompt, would be open to the whole node" .name) }}{{ end }}{{ end -}}
{{- end -}}
{{- with $worker.autoscaling -}}
{{- if and .enabled (eq (int .minReplicas) 0) (or (ne .kind "keda") (not .triggers)) -}}
{{- fail (printf "models.%s.autoscaling.minReplicas: 0 needs kind: keda and triggers of your own, such as cron, as no request wakes a model that has no worker" $name) -}}
{{- end -}}
{{- if and .triggers (ne .kind "keda") }}{{ fail (printf "models.%s.autoscaling.triggers: they are for kind: keda" $name) }}{{ end -}}
{{- end -}}
{{- if and $worker.kvDisk.claim (not $worker.kvDisk.size) }}{{ fail (printf "models.%s.kvDisk.size: a claim needs a size" .name) }}{{ end -}}
{{- include "headstart.checkEngine" (dict "model" . "worker" $worker "ownEngine" $ownEngine) -}}
{{- $served := default .name $worker.servedName -}}
{{- $other := get $sources $served -}}
{{- with .source -}}
{{- if and $other (ne . $other) }}{{ fail (printf "models.%s.servedName: another entry serves %s too, from %s; a name has one source, but this is %s" $name $served $other .) }}{{ end -}}
{{- $_ := set $sources $served . -}}
{{- end -}}
{{- include "headstart.checkClaims" (dict "pod" $worker "key" (printf "models.%s" .name)) -}}
{{- with $worker.updateStrategy -}}
{{- if and (eq .type "OnDelete") .rollingUpdate.partition }}{{ fail (printf "models.%s.updateStrategy.rollingUpdate: it is for type: RollingUpdate" $name) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- include "headstart.checkClaims" (dict "pod" .Values.gateway "key" "gateway") -}}
{{- if .Values.gateway.hostNetwork }}{{ include "headstart.checkHostNetwork" (dict "root" $ "key" "gateway") }}{{ end -}}
{{- if and (not .Values.models) (eq .Values.redis.mode "none") }}{{ fail "models: without any, workers join through Redis, but redis.mode is none" }}{{ end -}}
{{- with .Values.gateway.service -}}
{{- if and .nodePort (eq .type "ClusterIP") }}{{ fail "gateway.service.nodePort: a Service of type ClusterIP has none; set type: NodePort" }}{{ end -}}
{{- if and .externalTrafficPolicy (eq .type "ClusterIP") }}{{ fail "gateway.service.externalTrafficPolicy: a Service of type ClusterIP has none; set type: NodePort or LoadBalancer" }}{{ end -}}
{{- $service := . -}}
{{- range $key := list "loadBalancerIP" "loadBalancerClass" "loadBalancerSourceRanges" -}}
{{- if and (get $service $key) (ne $service.type "LoadBalancer") }}{{ fail (printf "gateway.service.%s: it is for type: LoadBalancer" $key) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- with .Values.gateway.strategy -}}
{{- if and (eq .type "RollingUpdate") (eq (toString .rollingUpdate.maxSurge) "0") (eq (toString .rollingUpdate.maxUnavailable) "0") -}}
{{- fail "gateway.strategy.rollingUpdate: maxSurge and maxUnavailable are both 0, so no pod could be replaced" -}}
{{- end -}}
{{- end -}}
{{- with .Values.metrics.serviceMonitor -}}
{{- if and .scrapeTimeout (gt (include "headstart.milliseconds" .scrapeTimeout | int) (include "headstart.milliseconds" .interval | int)) -}}
{{- fail (printf "metrics.serviceMonitor.scrapeTimeout: %s is longer than the interval %s" .scrapeTimeout .interval) -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.apiKeys.key .Values.apiKeys.plainKey }}{{ fail "apiKeys.plainKey: gateways would be given the key itself; name another key than apiKeys.key" }}{{ end -}}
{{- range $part, $tls := .Values.tls -}}
{{- if and $tls.secret (not $tls.name) }}{{ fail (printf "tls.%s.name: say which name the certificate of tls.%s.secret is for" $part $part) }}{{ end -}}
{{- if and $tls.name (not $tls.secret) }}{{ fail (printf "tls.%s.secret: a name is given, but no Secret with the certificate" $part) }}{{ end -}}
{{- end -}}
{{- with .Values.redis -}}
{{- if and (eq .mode "external") (not .external.url) }}{{ fail "redis.external.url: mode external needs the address of a Redis" }}{{ end -}}
{{- if and (ne .mode "external") .external.url }}{{ fail "redis.external.url: it is set, but redis.mode is not external" }}{{ end -}}
{{- if $.Values.networkPolicy.enabled -}}
{{- $ports := toStrings .external.ports -}}
{{- range regexFindAll ":[0-9]+([,/?]|$)" .external.url -1 -}}
{{- $port := regexFind "[0-9]+" . -}}
{{- if not (has $port $ports) }}{{ fail (printf "redis.external.ports: the NetworkPolicies would close port %s of redis.external.url; add it" $port) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if and (eq .mode "builtin") (ne 4 (list "default" "probe" .gatewayUsername .workerUsername | compact | uniq | len)) -}}
{{- fail "redis.gatewayUsername: the builtin Redis needs two users, here and in workerUsername, none of them default or probe" -}}
{{- end -}}
{{- if contains "@" .external.url }}{{ fail "redis.external.url: put no password into it; name a Secret in redis.existingSecret" }}{{ end -}}
{{- end -}}
{{- end -}}

{{- define "headstart.milliseconds" -}}
{{- mul (regexFind "^[0-9]+" .) (index (dict "ms" 1 "s" 1000 "m" 60000) (regexFind "[a-z]+$" .)) -}}
{{- end -}}

{{/* (dict "root" $ "key" "gateway") */}}
{{- define "headstart.checkHostNetwork" -}}
{{- if .root.Values.networkPolicy.enabled -}}
{{- fail (printf "%s.hostNetwork: NetworkPolicies do not know pods of the node's network; set networkPolicy.enabled: false" .key) -}}
{{- end -}}
{{- end -}}

{{/* A container may use only the claims of its pod. (dict "pod" $worker "key" "models.llama") */}}
{{- define "headstart.checkClaims" -}}
{{- $key := .key -}}
{{- $names := list -}}
{{- range .pod.resourceClaims }}{{ $names = append $names .name }}{{ end -}}
{{- range .pod.resources.claims -}}
{{- if not (has .name $names) }}{{ fail (printf "%s.resources.claims: %q is no name in resourceClaims" $key .name) }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* (dict "scaling" ... "key" "gateway.autoscaling") */}}
{{- define "headstart.checkReplicas" -}}
{{- if gt (int .scaling.minReplicas) (int .scaling.maxReplicas) -}}
{{- fail (printf "%s.minReplicas: %d is more than maxReplicas %d" .key (int .scaling.minReplicas) (int .scaling.maxReplicas)) -}}
{{- end -}}
{{- end -}}

{{/* (dict "model" $entry "worker" $merged) */}}
{{- define "headstart.checkEngine" -}}
{{- $name := .model.name -}}
{{- $count := int .worker.gpu.count -}}
{{- $external := include "headstart.isExternal" .worker -}}
{{- if eq .worker.engine "headstart" -}}
{{- if .model.vllm }}{{ fail (printf "models.%s.vllm: set engine: vllm" $name) }}{{ end -}}
{{- if $external }}{{ fail (printf "models.%s.external: set engine to what runs there: vllm or sglang" $name) }}{{ end -}}
{{- if gt $count 1 }}{{ fail (printf "models.%s.gpu.count: Headstart's own engine uses one GPU; engine: vllm can use more" $name) }}{{ end -}}
{{- else -}}
{{- range list "image" "kvDisk" -}}
{{- if hasKey $.model . }}{{ fail (printf "models.%s.%s: it is for Headstart's own engine; see the keys of vllm" $name .) }}{{ end -}}
{{- end -}}
{{- range $key := keys (default dict .model.options) | sortAlpha -}}
{{- if has $key $.ownEngine }}{{ fail (printf "models.%s.options.%s: it is for Headstart's own engine; vLLM's options are in vllm.extraArgs" $name $key) }}{{ end -}}
{{- end -}}
{{- if $external -}}
{{- include "headstart.checkExternal" . -}}
{{- else if eq .worker.engine "sglang" -}}
{{- fail (printf "models.%s.engine: the chart starts no SGLang, which is experimental; name servers that run already in external" $name) -}}
{{- else -}}
{{- with .worker.vllm -}}
{{- $size := mul .tensorParallelSize .pipelineParallelSize .dataParallelSize | int -}}
{{- if and $count (ne $count $size) -}}
{{- fail (printf "models.%s.gpu.count: it is %d, but tensorParallelSize x pipelineParallelSize x dataParallelSize is %d" $name $count $size) -}}
{{- end -}}
{{- range .extraArgs -}}
{{- if regexMatch "^(--(host|port|uds|config|api[-_]key|kv[-_]events[-_]config|served[-_]model[-_]name|(tensor|pipeline|data)[-_]parallel[-_]size)|-(tp|pp|dp))([= ]|$)" . -}}
{{- fail (printf "models.%s.vllm.extraArgs: %s is the chart's to set" $name (regexFind "^-+[^= ]+" .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (dict "model" $entry "worker" $merged) */}}
{{- define "headstart.checkExternal" -}}
{{- $name := .model.name -}}
{{- with .worker.external -}}
{{- if gt (compact (list (join "" .urls) .service (ternary "selector" "" (gt (len .selector) 0))) | len) 1 -}}
{{- fail (printf "models.%s.external: urls, service and selector exclude each other" $name) -}}
{{- end -}}
{{- end -}}
{{- range $key := keys (default dict .model.vllm) | sortAlpha -}}
{{- if not (has $key (list "apiKey" "adapterResources" "dataParallelSize")) }}{{ fail (printf "models.%s.vllm.%s: the engines of external run already; set it there" $name $key) }}{{ end -}}
{{- end -}}
{{- if or .worker.gpu.count .worker.autoscaling.enabled }}{{ fail (printf "models.%s.external: adapters need no gpu.count and no autoscaling; both belong to the engines" $name) }}{{ end -}}
{{- if gt (include "headstart.ranks" .worker | fromJsonArray | len) 16 }}{{ fail (printf "models.%s.replicas: a pod would have more than 16 adapters; raise replicas" $name) }}{{ end -}}
{{- end -}}
