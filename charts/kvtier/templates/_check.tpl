{{- /* What the schema cannot say, or says in a pattern that nobody can read. Included once, by the
     first template that is always there. */ -}}
{{- define "kvtier.check" -}}
{{- include "kvtier.check.labels" . -}}
{{- include "kvtier.check.volumes" . -}}
{{- include "kvtier.check.domains" . -}}
{{- include "kvtier.check.memory" . -}}
{{- include "kvtier.check.folders" . -}}
{{- include "kvtier.check.mounts" . -}}
{{- include "kvtier.check.sizes" . -}}
{{- $hit := .Values.prometheusRule.l0HitRate -}}
{{- if ge (float64 $hit.criticalPercent) (float64 $hit.warningPercent) -}}
{{- fail (printf "prometheusRule.l0HitRate: criticalPercent %v must be below warningPercent %v" $hit.criticalPercent $hit.warningPercent) -}}
{{- end -}}
{{- end -}}

{{- define "kvtier.check.labels" -}}
{{- $own := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "app.kubernetes.io/version" "app.kubernetes.io/managed-by" "helm.sh/chart" -}}
{{- $common := default dict .Values.commonLabels -}}
{{- range $value, $labels := dict "commonLabels" $common "serviceMonitor.labels" .Values.serviceMonitor.labels "prometheusRule.labels" .Values.prometheusRule.labels -}}
{{- range $key, $_ := $labels -}}
{{- if has $key $own -}}
{{- fail (printf "%s: the chart writes %s itself; leave it out" $value $key) -}}
{{- end -}}
{{- if and (ne $value "commonLabels") (hasKey $common $key) -}}
{{- fail (printf "%s: %s is in commonLabels too; leave one out" $value $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvtier.check.volumes" -}}
{{- $names := list -}}
{{- range .Values.volumes -}}
{{- if has .name $names -}}
{{- fail (printf "volumes: %q is there twice; give each volume a name of its own" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- end -}}

{{- define "kvtier.check.domains" -}}
{{- $names := list -}}
{{- $groups := dict -}}
{{- range .Values.domains -}}
{{- if has .name $names -}}
{{- fail (printf "domains: %q is there twice; give each domain a name of its own" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- if .gid -}}
{{- $gid := printf "%d" (int64 .gid) -}}
{{- if hasKey $groups $gid -}}
{{- fail (printf "domains: %q and %q both have gid %s, so that the engines of one could read the other's pages; give each a gid of its own" (get $groups $gid) .name $gid) -}}
{{- end -}}
{{- $_ := set $groups $gid .name -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvtier.check.memory" -}}
{{- $memory := .Values.agent.memory -}}
{{- $unit := dict "Mi" 1 "Gi" 1024 "Ti" 1048576 -}}
{{- $mebibytes := mul (regexFind "^[0-9]+" $memory | int64) (get $unit (regexFind "[A-Z]i$" $memory)) -}}
{{- if le (int64 $mebibytes) 2048 -}}
{{- fail (printf "agent.memory: %s is too little; write more than 2Gi, which the agent keeps for itself, for example 2Gi and the DRAM tier's size" $memory) -}}
{{- end -}}
{{- end -}}

{{- /* Settings that are sizes, as text; the schema has the bounds of all others. */ -}}
{{- define "kvtier.check.sizes" -}}
{{- $root := . -}}
{{- $unit := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 -}}
{{- range $program, $sizes := .Files.Get "files/sizes.json" | fromJson -}}
{{- $settings := default dict (index $root.Values $program).settings -}}
{{- range $name, $bounds := $sizes -}}
{{- $size := get $settings $name -}}
{{- if and (kindIs "string" $size) $size -}}
{{- $bytes := mulf (regexFind "^[0-9.]+" $size | float64) (get $unit (regexFind "[A-Za-z]*$" $size) | float64) -}}
{{- if or (lt $bytes (float64 $bounds.minimum.bytes)) (gt $bytes (float64 $bounds.maximum.bytes)) -}}
{{- fail (printf "%s.settings.%s: write a size from %s to %s, not %s" $program $name $bounds.minimum.text $bounds.maximum.text $size) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Every folder of the node that the agent mounts, as a list of (value, path). */ -}}
{{- define "kvtier.folders" -}}
{{- $agent := .Values.agent -}}
{{- $folders := list (list "agent.runDir" $agent.runDir) (list "agent.stateDir" $agent.stateDir) -}}
{{- if $agent.sharedMemory.hostPath -}}
{{- $folders = append $folders (list "agent.sharedMemory.hostPath" $agent.sharedMemory.hostPath) -}}
{{- end -}}
{{- if and (eq $agent.seccomp.type "Localhost") $agent.seccomp.install -}}
{{- $folders = append $folders (list "agent.seccomp.kubeletFolder" $agent.seccomp.kubeletFolder) -}}
{{- end -}}
{{- range $index, $volume := .Values.volumes -}}
{{- $folders = append $folders (list (printf "volumes[%d].hostPath" $index) $volume.hostPath) -}}
{{- end -}}
{{- toJson $folders -}}
{{- end -}}

{{- /* A path that the kubelet would read differently from how it is written could be the node's
     root, and two that are one folder would be two tiers on one drive. */ -}}
{{- define "kvtier.check.folders" -}}
{{- $seen := list -}}
{{- range $folder := include "kvtier.folders" . | fromJsonArray -}}
{{- $value := index $folder 0 -}}
{{- $path := index $folder 1 -}}
{{- if or (eq $path "/") (ne (clean $path) $path) (ne (trim $path) $path) (contains "$(" $path) -}}
{{- fail (printf "%s: %q is refused; write the plain path of a folder below /, without //, . or .., a / at the end, spaces around it or $(...)" $value $path) -}}
{{- end -}}
{{- range $other := $seen -}}
{{- include "kvtier.check.apart" (list $value $path (index $other 0) (index $other 1) "each needs a folder of its own, none inside another") -}}
{{- end -}}
{{- $seen = append $seen $folder -}}
{{- end -}}
{{- end -}}

{{- /* In the agent's container those folders have the node's paths, beside mounts of the chart's. */ -}}
{{- define "kvtier.check.mounts" -}}
{{- $agent := .Values.agent -}}
{{- $shm := default "/dev/shm/kvtier" $agent.sharedMemory.hostPath -}}
{{- $own := list (list "the agent's mounts of volumes" "/volumes") -}}
{{- if not $agent.sharedMemory.hostPath -}}
{{- $own = append $own (list "the Pod's own shared memory" $shm) -}}
{{- end -}}
{{- range $mount := list (list "agent.runDir" $agent.runDir) (list "agent.stateDir" $agent.stateDir) (list "agent.sharedMemory.hostPath" $agent.sharedMemory.hostPath) -}}
{{- $path := index $mount 1 -}}
{{- if eq $path "/tmp" -}}
{{- fail (printf "%s: /tmp is the container's own; write another folder, such as /run/kvtier" (index $mount 0)) -}}
{{- end -}}
{{- range $taken := $own -}}
{{- if $path -}}
{{- include "kvtier.check.apart" (list (index $mount 0) $path (index $taken 0) (index $taken 1) "write another folder") -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Called with (list VALUE PATH OTHER OTHERS-PATH ADVICE). */ -}}
{{- define "kvtier.check.apart" -}}
{{- $path := index . 1 -}}
{{- $other := index . 3 -}}
{{- if or (eq $path $other) (hasPrefix (printf "%s/" $other) $path) (hasPrefix (printf "%s/" $path) $other) -}}
{{- $how := ternary "is" (ternary "is inside" "contains" (hasPrefix (printf "%s/" $other) $path)) (eq $path $other) -}}
{{- fail (printf "%s: %s %s %s of %s; %s" (index . 0) $path $how $other (index . 2) (index . 4)) -}}
{{- end -}}
{{- end -}}
