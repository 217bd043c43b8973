{{- define "kvtier.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- /* 52 leaves room for "-operator" and "-agent" within the 63 characters of a name. */ -}}
{{- define "kvtier.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else if contains (include "kvtier.name" .) .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "kvtier.name" .) | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvtier.operator" -}}{{ include "kvtier.fullname" . }}-operator{{- end -}}
{{- define "kvtier.agent" -}}{{ include "kvtier.fullname" . }}-agent{{- end -}}

{{- /* Selector labels never change within a major version: a workload's selector is immutable.
     Called with (list $ COMPONENT). */ -}}
{{- define "kvtier.selectorLabels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "kvtier.name" $root | quote }}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 | quote }}
{{- end -}}

{{- define "kvtier.labels" -}}
{{- $root := index . 0 -}}
{{ include "kvtier.selectorLabels" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* Called with (list $ IMAGE). */ -}}
{{- define "kvtier.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default $root.Chart.AppVersion $image.tag }}
{{- end -}}
{{- end -}}

{{- /* One value for requests and limits: a cache that is squeezed below its limit by a neighbour,
     or killed above its request, is worse than none. Called with (list CPU MEMORY). */ -}}
{{- define "kvtier.resources" -}}
requests:
  cpu: {{ index . 0 | quote }}
  memory: {{ index . 1 | quote }}
limits:
  cpu: {{ index . 0 | quote }}
  memory: {{ index . 1 | quote }}
{{- end -}}

{{- /* Settings as environment, sorted by name. A setting that the chart makes from another value is
     refused, so that two places cannot disagree. Called with (list PREFIX SETTINGS OWNED PATH). */ -}}
{{- define "kvtier.settings" -}}
{{- $prefix := index . 0 -}}
{{- $owned := index . 2 -}}
{{- $path := index . 3 -}}
{{- range $name, $value := index . 1 }}
{{- if has $name $owned }}
{{- fail (printf "%s.%s: the chart sets this from a value of its own; see values.yaml" $path $name) }}
{{- end }}
- name: {{ $prefix }}{{ upper $name }}
  value: {{ if kindIs "string" $value }}{{ $value | quote }}{{ else }}{{ $value | toJson | quote }}{{ end }}
{{- end }}
{{- end -}}
