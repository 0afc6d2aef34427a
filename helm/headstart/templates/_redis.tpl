{{- define "headstart.redis.enabled" -}}
{{- if ne .Values.redis.mode "none" }}true{{ end -}}
{{- end -}}

{{- define "headstart.redis.builtin" -}}
{{- if eq .Values.redis.mode "builtin" }}true{{ end -}}
{{- end -}}

{{- define "headstart.redis.secretName" -}}
{{- if .Values.redis.existingSecret -}}
{{- .Values.redis.existingSecret -}}
{{- else if include "headstart.redis.builtin" . -}}
{{- include "headstart.fullname" . }}-redis
{{- end -}}
{{- end -}}

{{/* The Secret with the CA that signed Redis' certificate; empty: none is mounted. */}}
{{- define "headstart.redis.caSecret" -}}
{{- if include "headstart.redis.builtin" . -}}
{{- .Values.redis.builtin.tlsSecret -}}
{{- else -}}
{{- .Values.redis.external.caSecret -}}
{{- end -}}
{{- end -}}

{{- define "headstart.redis.caKey" -}}
{{- ternary "ca.crt" .Values.redis.external.caKey (eq .Values.redis.mode "builtin") -}}
{{- end -}}

{{- define "headstart.redis.url" -}}
{{- $url := .Values.redis.external.url -}}
{{- if include "headstart.redis.builtin" . -}}
{{- $url = printf "%s://%s-redis:6379" (ternary "rediss" "redis" (ne .Values.redis.builtin.tlsSecret "")) (include "headstart.fullname" .) -}}
{{- end -}}
{{- if include "headstart.redis.caSecret" . -}}
{{- $url = printf "%s%sssl_ca_certs=/etc/headstart/redis-ca/ca.crt" $url (ternary "&" "?" (contains "?" $url)) -}}
{{- end -}}
{{- $url -}}
{{- end -}}

{{/* Arguments of a gateway or worker. (dict "root" $ "username" ...) */}}
{{- define "headstart.redis.args" -}}
{{- $redis := .root.Values.redis -}}
{{- if include "headstart.redis.enabled" .root }}
- {{ printf "--redis=%s" (include "headstart.redis.url" .root) | quote }}
- --redis-prefix={{ $redis.prefix }}
- --redis-shards={{ int $redis.shards }}
{{- if include "headstart.redis.secretName" .root }}
{{- with .username }}
- --redis-username={{ . }}
{{- end }}
- --redis-password-file=/etc/headstart/redis/password
{{- end }}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "passwordKey" ...) */}}
{{- define "headstart.redis.volumes" -}}
{{- if include "headstart.redis.enabled" .root }}
{{- with include "headstart.redis.secretName" .root }}
- name: redis-password
  secret:
    secretName: {{ . }}
    items:
      - key: {{ $.passwordKey }}
        path: password
{{- end }}
{{- with include "headstart.redis.caSecret" .root }}
- name: redis-ca
  secret:
    secretName: {{ . }}
    items:
      - key: {{ include "headstart.redis.caKey" $.root }}
        path: ca.crt
{{- end }}
{{- end }}
{{- end -}}

{{- define "headstart.redis.volumeMounts" -}}
{{- if include "headstart.redis.enabled" . }}
{{- if include "headstart.redis.secretName" . }}
- name: redis-password
  mountPath: /etc/headstart/redis
  readOnly: true
{{- end }}
{{- if include "headstart.redis.caSecret" . }}
- name: redis-ca
  mountPath: /etc/headstart/redis-ca
  readOnly: true
{{- end }}
{{- end }}
{{- end -}}

{{/* NetworkPolicy egress towards Redis, for gateways and workers alike. */}}
{{- define "headstart.redis.egress" -}}
{{- if include "headstart.redis.builtin" . }}
- to:
    - podSelector:
        matchLabels:
          {{- include "headstart.selectorLabels" (dict "root" . "component" "redis") | nindent 10 }}
  ports:
    - protocol: TCP
      port: 6379
{{- else if include "headstart.redis.enabled" . }}
- ports:
    {{- range .Values.redis.external.ports }}
    - protocol: TCP
      port: {{ int . }}
    {{- end }}
{{- end }}
{{- end -}}

{{/* A quarter of the memory is left for buffers, connections and fragmentation. Redis never evicts keys by itself. */}}
{{- define "headstart.redis.config" -}}
bind * -::*
protected-mode no
{{- if .Values.redis.builtin.tlsSecret }}
port 0
tls-port 6379
tls-cert-file /tls/tls.crt
tls-key-file /tls/tls.key
tls-ca-cert-file /tls/ca.crt
tls-auth-clients no
{{- else }}
port 6379
{{- end }}
dir /run/redis
save ""
appendonly no
aclfile /run/redis/users.acl
maxmemory {{ div (mul (int .Values.redis.builtin.memoryMiB) 3) 4 }}mb
maxmemory-policy noeviction
timeout 0
tcp-keepalive 60
{{- end -}}

{{- define "headstart.redis.ping" -}}
{{- $command := list "redis-cli" "-e" "--no-auth-warning" "--user" "probe" "--pass" "probe" -}}
{{- if .Values.redis.builtin.tlsSecret -}}
{{- $command = concat $command (list "--tls" "--insecure") -}}
{{- end -}}
{{- append $command "ping" | toJson -}}
{{- end -}}
