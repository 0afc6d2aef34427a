{{/* What the schema cannot say: relations between values. Each message names the key. */}}
{{- define "headstart.checks" -}}
{{- $names := list -}}
{{- range .Values.models -}}
{{- if has .name $names }}{{ fail (printf "models: the name %q stands twice" .name) }}{{ end -}}
{{- if has .name (list "gateway" "gateway-ops" "redis" "cluster" "api-keys" "test") }}{{ fail (printf "models: the name %q is taken by a part of the chart" .name) }}{{ end -}}
{{- $names = append $names .name -}}
{{- $worker := include "headstart.worker" (dict "root" $ "model" .) | fromYaml -}}
{{- if and $worker.volume.existingClaim $worker.volume.size -}}
{{- fail (printf "models.%s.volume: existingClaim and size exclude each other" .name) -}}
{{- end -}}
{{- if and $worker.volume.readOnly (not $worker.volume.existingClaim) -}}
{{- fail (printf "models.%s.volume.readOnly: only an existingClaim can be read only, because nothing could fill a new volume" .name) -}}
{{- end -}}
{{- if and $worker.volume.readOnly $worker.download -}}
{{- fail (printf "models.%s.download: the volume is read only; set download: false" .name) -}}
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
{{- if contains "@" .external.url }}{{ fail "redis.external.url: put no password into it; name a Secret in redis.existingSecret" }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* (dict "scaling" ... "key" "gateway.autoscaling") */}}
{{- define "headstart.checkReplicas" -}}
{{- if gt (int .scaling.minReplicas) (int .scaling.maxReplicas) -}}
{{- fail (printf "%s.minReplicas: %d is more than maxReplicas %d" .key (int .scaling.minReplicas) (int .scaling.maxReplicas)) -}}
{{- end -}}
{{- end -}}
