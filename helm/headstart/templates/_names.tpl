{{/* Names of values: each key is known, else the nearest ones are named. tools/values.py writes what is known. */}}
{{- define "headstart.names" -}}
{{- .Files.Get "files/names.json" -}}
{{- end -}}

{{- define "headstart.checkNames" -}}
{{- $names := include "headstart.names" . | fromJson -}}
{{- include "headstart.checkGroup" (dict "names" $names "group" "" "at" "" "values" .Values) -}}
{{- range .Values.models -}}
{{- $entry := printf "models.%s" .name -}}
{{- include "headstart.checkGroup" (dict "names" $names "group" "worker" "at" $entry "entry" $entry "values" (omit . "name" "source")) -}}
{{- end -}}
{{- end -}}

{{/* (dict "names" ... "group" "where names has it" "at" "what messages call it" "entry" "models.NAME or nothing" "values" ...) */}}
{{- define "headstart.checkGroup" -}}
{{- range $key, $value := .values -}}
{{- $path := list $.group $key | compact | join "." -}}
{{- $at := list $.at $key | compact | join "." -}}
{{- with get $.names.instead $path }}{{ fail (printf "%s: use %s" $at .) }}{{ end -}}
{{- $more := merge (dict "key" $key "group" $path "at" $at "values" $value) (omit $ "values") -}}
{{- if not (has $key (get $.names.groups $.group)) }}{{ fail (printf "%s: there is no such value%s" $at (include "headstart.nearest" (merge (dict "group" $.group) $more))) }}{{ end -}}
{{- if hasKey $.names.groups $path -}}
{{- if kindIs "map" $value -}}
{{- include "headstart.checkGroup" $more -}}
{{- else if not (kindIs "invalid" $value) -}}
{{- fail (printf "%s: it has the keys %s" $at (get $.names.groups $path | join ", ")) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Names that are like a key, those of its own group first. */}}
{{- define "headstart.nearest" -}}
{{- $most := 650 -}}
{{- $nearest := list -}}
{{- range $group, $keys := .names.groups -}}
{{- range $keys -}}
{{- $path := list $group . | compact | join "." -}}
{{- $likeness := max (include "headstart.likeness" (list $.key .) | int) (include "headstart.likeness" (list $.key (list (base (replace "." "/" $group)) . | join "")) | int) -}}
{{- if and (ge $likeness 550) (or (eq $.group $group) (hasPrefix (printf "%s." $.group) $path)) }}{{ $likeness = add $likeness 300 }}{{ end -}}
{{- $shown := $path -}}
{{- with $.entry }}{{ $shown = regexReplaceAll "^worker[.]" $path (printf "%s." .) }}{{ end -}}
{{- with get $.names.groups $path }}{{ if lt (len .) 6 }}{{ $shown = printf "%s (%s)" $shown (join ", " .) }}{{ end }}{{ end -}}
{{- if gt $likeness $most }}{{ $most = $likeness }}{{ $nearest = list $shown }}{{ else if eq $likeness $most }}{{ $nearest = append $nearest $shown }}{{ end -}}
{{- end -}}
{{- end -}}
{{- with $nearest }}; did you mean {{ slice . 0 (min 3 (len .) | int) | join " or " }}?{{ else }}; it is none of {{ get $.names.groups $.group | join ", " }}{{ end -}}
{{- end -}}

{{/* How many pairs of letters two words share, in thousandths. (list "gpus" "gpu") */}}
{{- define "headstart.likeness" -}}
{{- $a := regexReplaceAll "[^a-z0-9]" (first . | lower) "" -}}
{{- $b := regexReplaceAll "[^a-z0-9]" (last . | lower) "" -}}
{{- $shared := 0 -}}
{{- range $i := until (max 0 (sub (len $a) 1) | int) -}}
{{- if contains (substr $i (add $i 2 | int) $a) $b }}{{ $shared = add $shared 1 }}{{ end -}}
{{- end -}}
{{- div (mul 2000 $shared) (max 1 (add (len $a) (len $b) -2)) -}}
{{- end -}}
