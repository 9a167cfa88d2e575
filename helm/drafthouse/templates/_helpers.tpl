{{- define "drafthouse.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* RayService's names become parts of others: 40 characters leave room for KubeRay's suffixes. */}}
{{- define "drafthouse.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "drafthouse.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "drafthouse.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What the release's pods are selected by: no label that KubeRay sets by itself. */}}
{{- define "drafthouse.selectorLabels" -}}
app.kubernetes.io/part-of: drafthouse
app.kubernetes.io/instance: {{ quote .Release.Name }}
{{- end -}}

{{- define "drafthouse.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ include "drafthouse.name" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "drafthouse.selectorLabels" . }}
{{- end -}}

{{/*
Labels of the pods of one pool. None that changes with every version of the chart: KubeRay takes pods with other labels
for another cluster, and makes it beside the first. Takes a dict: root, component.
*/}}
{{- define "drafthouse.podLabels" -}}
{{- /* KubeRay's Service for the head selects by the name that KubeRay gives it. */}}
{{- if ne .component "head" -}}
app.kubernetes.io/name: {{ include "drafthouse.name" .root }}
{{ end -}}
{{ include "drafthouse.selectorLabels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* The Service that clients ask. KubeRay makes it. */}}
{{- define "drafthouse.serviceName" -}}
{{- include "drafthouse.fullname" . }}{{ if not .Values.ingress.enabled }}-serve-svc{{ end }}
{{- end -}}

{{/* What each of some ranks gets of the CPUs of a pod, as Ray counts them: in parts of 1/10000, never too much. */}}
{{- define "drafthouse.cpusEach" -}}
{{- divf (floor (divf (mulf .cpus 10000) .ranks)) 10000 -}}
{{- end -}}

{{/*
What a quantity of bytes is as a number.
*/}}
{{- define "drafthouse.bytes" -}}
{{- $units := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 -}}
{{- $number := regexFind "^[0-9]+(\\.[0-9]+)?" . -}}
{{- mulf (float64 $number) (get $units (trimPrefix $number .)) -}}
{{- end -}}

{{/*
Seconds between the order to stop a pod and `ray stop`. By default streams have `drain_timeout_s`, and Serve gives
replicas a few seconds more (graceful_shutdown_timeout_s). Takes a dict: root, pool (its values).
*/}}
{{- define "drafthouse.drainSeconds" -}}
{{- if kindIs "string" .pool.drainSeconds -}}
{{- add (ceil (dig "cluster" "drain_timeout_s" 60.0 .root.Values.config)) 10 -}}
{{- else -}}
{{- int .pool.drainSeconds -}}
{{- end -}}
{{- end -}}

{{/*
Fewest, usual and largest number of replicas of each group of workers, in the order of workerGroupSpecs, the pods of each, and
how many pods are ready at the least. KubeRay's probe asks for a proxy of Serve's, which is where a replica is: a pod without a
door, coordinator or draft worker is not ready, and of a group's pods one has the coordinator. The chart's probe of such groups
asks for none (drafthouse.hasPodsOfRanks).
*/}}
{{- define "drafthouse.groupSizes" -}}
{{- $values := .Values -}}
{{- $nodes := int $values.target.nodesPerGroup -}}
{{- $hosts := ternary $nodes 1 $values.target.multiHost -}}
{{- $replicas := div $nodes $hosts -}}
{{- $spare := mul $values.target.spareGroups $replicas -}}
{{- $isScaled := $values.autoscaling.enabled -}}
{{- $fewestGroups := include "drafthouse.fewest" (dict "root" . "deployment" "Coordinator") | int -}}
{{- $leastSets := ternary $fewestGroups (int $values.target.groups) $isScaled | mul $replicas | add $spare -}}
{{- if $values.ingress.enabled }}
{{- $doorsEach := 1 -}}
{{- range $values.serve.deployments -}}
{{- if eq (toString .name) "Ingress" -}}{{- $doorsEach = get . "max_replicas_per_node" | default 1 -}}{{- end -}}
{{- end }}
- name: ingress
  hosts: 1
  min: {{ $values.ingress.replicas }}
  replicas: {{ $values.ingress.replicas }}
  max: {{ $values.ingress.replicas }}
  ready: {{ divf (include "drafthouse.fewest" (dict "root" . "deployment" "Ingress")) $doorsEach | ceil }}
{{- end }}
- name: target
  hosts: {{ $hosts }}
  min: {{ $leastSets }}
  replicas: {{ mul $values.target.groups $replicas | add $spare }}
  max: {{ mul (max (int $values.target.groups) (int $values.target.maxGroups)) $replicas | add $spare }}
  ready: {{ ternary (mul $leastSets $hosts) $fewestGroups (include "drafthouse.hasPodsOfRanks" . | empty | not) }}
{{- if include "drafthouse.hasDraftPool" . }}
{{- $fewestWorkers := include "drafthouse.fewest" (dict "root" . "deployment" "DraftPool") | int }}
- name: draft
  hosts: 1
  min: {{ ternary $fewestWorkers (int $values.draft.workers) $isScaled }}
  replicas: {{ $values.draft.workers }}
  max: {{ max (int $values.draft.workers) (int $values.draft.maxWorkers) }}
  ready: {{ $fewestWorkers }}
{{- end }}
{{- end -}}

{{/*
What gives a cluster that runs the numbers of pods of the values. Where there are too many, KubeRay ends those that
scaleStrategy names, and else the first ones of its list, which may be those that serve. A pod on which nothing of Serve's runs
is not ready (KubeRay's own probe); where that tells nothing, because a group has several pods or the probe is another one, they
have to be named by hand. With the autoscaler it is that which chooses.
*/}}
{{- define "drafthouse.scaleCommands" -}}
{{- $patch := list -}}
{{- $choices := list -}}
{{- $isScaled := .Values.autoscaling.enabled -}}
{{- range $index, $group := include "drafthouse.groupSizes" . | fromYamlArray -}}
{{- $path := printf "/spec/workerGroupSpecs/%d" $index -}}
{{- $patch = append $patch (dict "op" "replace" "path" (printf "%s/minReplicas" $path) "value" (int $group.min)) -}}
{{- $patch = append $patch (dict "op" "replace" "path" (printf "%s/maxReplicas" $path) "value" (int $group.max)) -}}
{{- if not $isScaled -}}
{{- $patch = append $patch (dict "op" "replace" "path" (printf "%s/replicas" $path) "value" (int $group.replicas)) -}}
{{- $patch = append $patch (dict "op" "add" "path" (printf "%s/scaleStrategy" $path) "value" (dict "workersToDelete" (list (printf "@%s" $group.name)))) -}}
{{- $choice := printf "%s=$(beyond %s %d" $group.name $group.name (mul $group.replicas $group.hosts) -}}
{{- if or (index $.Values $group.name).probes.readiness (and (eq $group.name "target") (gt (int $.Values.target.nodesPerGroup) 1)) -}}
{{- $choice = printf "%s \"${IDLE_%s:-none}\"" $choice (upper $group.name) -}}
{{- end -}}
{{- $choices = append $choices (printf "%s) &&" $choice) -}}
{{- end -}}
{{- end -}}
{{- $json := toJson $patch -}}
{{- range list "ingress" "target" "draft" -}}
{{- $json = replace (printf "\"@%s\"" .) (printf "'\"$%s\"'" .) $json -}}
{{- end -}}
cluster=$(kubectl -n {{ .Release.Namespace }} get rayservice {{ include "drafthouse.fullname" . }} -o jsonpath='{.status.activeServiceStatus.rayClusterName}')
{{- if not $isScaled }}
beyond() {
  pods=$(kubectl -n {{ .Release.Namespace }} get pods -l "ray.io/cluster=$cluster,ray.io/group=$1" \
    -o jsonpath='{range .items[*]}{.metadata.name} {.status.conditions[?(@.type=="Ready")].status}{"\n"}{end}') || return
  printf '%s\n' "$pods" | awk -v group="$1" -v number="$2" -v idle="$3" '
    NF { there++ }
    NF && (idle != "" ? index(" " idle " ", " " $1 " ") : $2 != "True") { names[++found] = "\"" $1 "\"" }
    END {
      more = there - number
      if (more > found + 0) {
        print more " pods of " group " are too many, and nothing runs on " found + 0 ", as far as is known: nothing is changed" | "cat >&2"
        exit 1
      }
      for (i = 1; i <= more; i++) printf "%s%s", (i > 1 ? "," : ""), names[i]
    }'
}
{{ join "\n" $choices }}
{{- end }}
kubectl -n {{ .Release.Namespace }} patch raycluster "$cluster" --type json -p '{{ $json }}'
{{- end -}}

{{/*
The image of all pods. One, since processes of a Ray cluster have to have the same Python and Ray, and the task that builds the
application runs on any of them: where a pod has GPUs, that for CUDA.
*/}}
{{- define "drafthouse.image" -}}
{{- $gpus := .Values.target.gpu -}}
{{- if include "drafthouse.hasDraftPool" . -}}{{- $gpus = add $gpus .Values.draft.gpu -}}{{- end -}}
{{- $tag := ternary (printf "%s-cuda" .Chart.AppVersion) .Chart.AppVersion (gt (int $gpus) 0) -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default $tag }}
{{- end -}}

{{/* What port 8000 speaks. */}}
{{- define "drafthouse.scheme" -}}
{{- ternary "https" "http" (not (empty .Values.tls.existingSecret)) -}}
{{- end -}}

{{- define "drafthouse.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "drafthouse.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Non-empty where a draft model, or heads that are not at the target, draft: these have pods of their own. */}}
{{- define "drafthouse.hasDraftPool" -}}
{{- $speculative := dig "speculative_config" dict .Values.config -}}
{{- if eq (dig "method" "ngram" $speculative) "draft_model" -}}yes{{- end -}}
{{- if eq (dig "heads_at" "target" $speculative) "draft_pool" -}}yes{{- end -}}
{{- range (dig "drafters" list $speculative) -}}
{{- if eq .method "draft_model" -}}yes{{- end -}}
{{- end -}}
{{- end -}}

{{/* Ranks of one copy of the target. */}}
{{- define "drafthouse.targetRanks" -}}
{{- mul (dig "target" "tensor_parallel_size" 1 .Values.config) (dig "target" "pipeline_parallel_size" 1 .Values.config) -}}
{{- end -}}

{{/*
Non-empty where target pods have a readiness probe of the chart's. Of a group of several pods one has a proxy of Serve's, which
KubeRay's probe asks for: the others would never be ready, and budgets would let nothing be evicted. Not where KubeRay's Service
leads to all pods (ingress.enabled: false): those without a proxy have to be left out of it.
*/}}
{{- define "drafthouse.hasPodsOfRanks" -}}
{{- if and .Values.ingress.enabled (gt (int .Values.target.nodesPerGroup) 1) -}}yes{{- end -}}
{{- end -}}

{{/* The autoscaling of a pool of config.cluster: {} where there is none, or null takes back what there was. */}}
{{- define "drafthouse.scaling" -}}
{{- $cluster := get .config "cluster" | default dict -}}
{{- $pool := get $cluster .pool | default dict -}}
{{- get $pool "autoscaling" | default dict | toYaml -}}
{{- end -}}

{{/* The same of a deployment of Serve's: doors have none. Takes a dict: root, deployment. */}}
{{- define "drafthouse.scalingOf" -}}
{{- $pool := get (dict "Coordinator" "target_groups" "DraftPool" "draft_pool") .deployment -}}
{{- include "drafthouse.scaling" (dict "config" .root.Values.config "pool" $pool) -}}
{{- end -}}

{{/* Most target groups that Serve may be asked for. */}}
{{- define "drafthouse.mostGroups" -}}
{{- $scaling := include "drafthouse.scaling" (dict "config" .Values.config "pool" "target_groups") | fromYaml -}}
{{- $most := get $scaling "max_groups" | default .Values.target.groups | int -}}
{{- range .Values.serve.deployments -}}
{{- if eq (toString .name) "Coordinator" -}}
{{- $bounds := get . "autoscaling_config" | default dict -}}
{{- $most = get $bounds "max_replicas" | default (dig "num_replicas" 0 . | int | default $most) | int -}}
{{- end -}}
{{- end -}}
{{- $most -}}
{{- end -}}

{{/*
How a changed config replaces target groups. The application sees no pods that are yet to come (check_resources), so that
`auto` would always be `in_place` to it: here it is `surge` where there are pods for one group more than Serve has.
*/}}
{{- define "drafthouse.updates" -}}
{{- $updates := dig "cluster" "updates" "auto" .Values.config -}}
{{- if eq $updates "auto" -}}
{{- $updates = ternary "surge" "in_place" (include "drafthouse.hasRoomForUpdates" . | empty | not) -}}
{{- end -}}
{{- $updates -}}
{{- end -}}

{{/* Non-empty where there are, or with the autoscaler may be, pods for one target group more than Serve has. */}}
{{- define "drafthouse.hasRoomForUpdates" -}}
{{- $target := .Values.target -}}
{{- $pods := add (max (int $target.groups) (int $target.maxGroups)) $target.spareGroups -}}
{{- if gt (int $pods) (include "drafthouse.mostGroups" . | int) -}}yes{{- end -}}
{{- end -}}

{{/*
Fewest doors, groups or workers that Serve may go down to, of those that there are pods for at first. Takes a dict: root,
deployment.
*/}}
{{- define "drafthouse.fewest" -}}
{{- $values := .root.Values -}}
{{- $pods := get (dict "Ingress" $values.ingress.replicas "Coordinator" $values.target.groups "DraftPool" $values.draft.workers) .deployment | int -}}
{{- $fewest := $pods -}}
{{- with include "drafthouse.scalingOf" . | fromYaml -}}
{{- $fewest = dig (ternary "min_groups" "min_workers" (eq $.deployment "Coordinator")) 1 . | int -}}
{{- end -}}
{{- range $values.serve.deployments -}}
{{- if eq (toString .name) $.deployment -}}
{{- $number := get . "num_replicas" | default $fewest -}}
{{- $fewest = min $fewest (ternary 1 $number (eq (toString $number) "auto") | int) -}}
{{- with get . "autoscaling_config" -}}{{- $fewest = dig "min_replicas" 1 . | int -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- min $pods $fewest -}}
{{- end -}}

{{/*
Non-empty where Serve is told how many groups or workers there may be, beside the pods that there are at first: by bounds, or
a number. Takes a dict: root, deployment.
*/}}
{{- define "drafthouse.isScaled" -}}
{{- if include "drafthouse.scalingOf" . | fromYaml -}}yes{{- end -}}
{{- range .root.Values.serve.deployments -}}
{{- if and (eq (toString .name) $.deployment) (or (get . "autoscaling_config") (get . "num_replicas")) -}}yes{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Environment variables that cannot be given by hand, and why: they would contradict other values, and KubeRay takes what is
given instead of its own, or refuses the cluster where nobody looks.
*/}}
{{- define "drafthouse.decidedEnv" -}}
HOME: is where compileCache is mounted, in a root that is read-only
RAY_ADDRESS: is KubeRay's, and how pods are drained
RAY_AUTH_MODE: follows from rayAuth.enabled
RAY_AUTH_TOKEN: comes from rayAuth.existingSecret
RAY_enable_autoscaler_v2: follows from autoscaling.enabled
RAY_REDIS_ADDRESS: is gcsFaultTolerance.redisAddress
RAY_external_storage_namespace: is gcsFaultTolerance.externalStorageNamespace
REDIS_PASSWORD: comes from gcsFaultTolerance.existingSecret
REDIS_USERNAME: is gcsFaultTolerance.username, or comes from usernameKey there
RAY_SERVE_ENABLE_HA_PROXY: follows from ingress.proxy
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH: is the chart's, or nobody gave up clients that do not read
{{- end -}}

{{/*
Non-empty where all models lie on the one claim, which every pod mounts: what is missing where the application is built is
missing everywhere. Other volumes may be a node's own.
*/}}
{{- define "drafthouse.areModelsEverywhere" -}}
{{- $values := .Values -}}
{{- $areThere := and $values.models.claim (not $values.models.volume) -}}
{{- $speculative := dig "speculative_config" dict $values.config -}}
{{- range prepend (prepend (dig "drafters" list $speculative) $speculative) $values.config.target -}}
{{- with dig "model" "" . -}}
{{- if not (hasPrefix (printf "%s/" (trimSuffix "/" $values.models.mountPath)) .) -}}{{- $areThere = false -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if $areThere -}}yes{{- end -}}
{{- end -}}

{{/* Folders and files in `config` that are not absolute fail here: the application would refuse them where nobody looks. */}}
{{- define "drafthouse.checkPaths" -}}
{{- $speculative := dig "speculative_config" dict .Values.config -}}
{{- $blocks := dict "config.target" .Values.config.target "config.speculative_config" $speculative -}}
{{- range $index, $drafter := dig "drafters" list $speculative -}}
{{- $_ := set $blocks (printf "config.speculative_config.drafters[%d]" $index) $drafter -}}
{{- end -}}
{{- range $place, $block := $blocks -}}
{{- range $key := list "model" "compile.cache_dir" "retrieval.path" "retrieval.cache_dir" "profile_dir" -}}
{{- $path := $block -}}
{{- range splitList "." $key -}}{{- $path = dig . nil ($path | default dict) -}}{{- end -}}
{{- if and (kindIs "string" $path) (not (hasPrefix "/" (toString $path))) -}}
{{- $right := ternary (printf "a folder's path, such as %s/%s (models.mountPath)" (trimSuffix "/" $.Values.models.mountPath) (base ($path | default "draft"))) "a path" (eq $key "model") -}}
{{- fail (printf "%s.%s: %q does not begin with /, and pods know no folder that it could be relative to: give %s" $place $key $path $right) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What contradicts itself fails here, before anything is changed. */}}
{{- define "drafthouse.check" -}}
{{- $values := .Values -}}
{{- $target := $values.target -}}
{{- $ranks := include "drafthouse.targetRanks" . | int -}}
{{- $stages := dig "target" "pipeline_parallel_size" 1 $values.config | int -}}
{{- $nodes := int $target.nodesPerGroup -}}
{{- $name := include "drafthouse.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "fullnameOverride: %s is no name for a RayService, which has lower-case letters, digits and dashes and begins with a letter: give one, or another name of the release" $name) -}}
{{- end -}}
{{- range $pool := list "head" "ingress" "target" "draft" -}}
{{- $store := get (index $values $pool).rayStartParams "object-store-memory" | default (include "drafthouse.objectStore" $) -}}
{{- if le (include "drafthouse.bytes" (index $values $pool).shmSize | float64) (float64 $store) -}}
{{- fail (printf "%s.shmSize: %s does not hold Ray's object store of %s bytes, which would be a file on the node's disk: give more" $pool (index $values $pool).shmSize $store) -}}
{{- end -}}
{{- end -}}
{{- if mod $ranks $nodes -}}
{{- fail (printf "target.nodesPerGroup: %d pods cannot share the %d ranks of a target group (tensor_parallel_size x pipeline_parallel_size) equally" $nodes $ranks) -}}
{{- end -}}
{{- if and (gt $stages 1) (mod $stages $nodes) -}}
{{- fail (printf "target.nodesPerGroup: %d pods cannot share %d pipeline stages: the ranks of a stage stay on one node" $nodes $stages) -}}
{{- end -}}
{{- if and $target.gpu (ne (int $target.gpu) (div $ranks $nodes | int)) -}}
{{- fail (printf "target.gpu: each pod holds %d of the %d ranks of a target group, and a rank takes one GPU: give %d, or 0 for CPUs only" (div $ranks $nodes) $ranks (div $ranks $nodes)) -}}
{{- end -}}
{{- if and $target.maxGroups (lt (int $target.maxGroups) (int $target.groups)) -}}
{{- fail (printf "target.maxGroups: %d is less than target.groups, %d" (int $target.maxGroups) (int $target.groups)) -}}
{{- end -}}
{{- $possible := add (max (int $target.groups) (int $target.maxGroups)) $target.spareGroups | int -}}
{{- if and $values.autoscaling.enabled $target.multiHost (gt $nodes 1) (gt $possible 1) -}}
{{- fail (printf "target.multiHost: for each pod that the autoscaler ends, KubeRay ends all that it started with it, and those may be of a group that serves: with autoscaling.enabled, %d pods per group and %d groups at most (spareGroups included) write false" $nodes $possible) -}}
{{- end -}}
{{- if and $target.maxGroups (not $values.autoscaling.enabled) -}}
{{- fail "target.maxGroups: needs autoscaling.enabled; pods beside those of target.groups without it: target.spareGroups" -}}
{{- end -}}
{{- if include "drafthouse.hasDraftPool" . -}}
{{- $draft := $values.draft -}}
{{- $draftRanks := dig "speculative_config" "draft_tensor_parallel_size" 1 $values.config | int -}}
{{- if and (eq (dig "speculative_config" "method" "" $values.config) "draft_model") (not (dig "speculative_config" "model" "" $values.config)) -}}
{{- fail "config.speculative_config.model: method draft_model needs the folder of a draft model" -}}
{{- end -}}
{{- if and $draft.gpu (ne (int $draft.gpu) $draftRanks) -}}
{{- fail (printf "draft.gpu: a draft worker has %d ranks (draft_tensor_parallel_size), each takes one GPU: give %d, or 0 for CPUs only" $draftRanks $draftRanks) -}}
{{- end -}}
{{- if and $draft.maxWorkers (lt (int $draft.maxWorkers) (int $draft.workers)) -}}
{{- fail (printf "draft.maxWorkers: %d is less than draft.workers, %d" (int $draft.maxWorkers) (int $draft.workers)) -}}
{{- end -}}
{{- if and $draft.maxWorkers (not $values.autoscaling.enabled) -}}
{{- fail "draft.maxWorkers: needs autoscaling.enabled" -}}
{{- end -}}
{{- if and (gt (int $draft.maxWorkers) (int $draft.workers)) (not (include "drafthouse.isScaled" (dict "root" . "deployment" "DraftPool"))) -}}
{{- fail (printf "draft.maxWorkers: nobody asks for more than the %d of draft.workers: give config.cluster.draft_pool.autoscaling, as {min_workers: 1, max_workers: %d}, or leave it out" (int $draft.workers) (int $draft.maxWorkers)) -}}
{{- end -}}
{{- end -}}
{{- if not (dig "target" "model" "" $values.config) -}}
{{- fail "config.target.model: is required" -}}
{{- end -}}
{{- include "drafthouse.checkPaths" . -}}
{{- if and $values.apiKeys.insecure $values.apiKeys.existingSecret -}}
{{- fail "apiKeys: insecure contradicts existingSecret; empty one of them" -}}
{{- end -}}
{{- if not (or $values.apiKeys.insecure $values.apiKeys.existingSecret) -}}
{{- fail "apiKeys.existingSecret: name a Secret with API keys, or set apiKeys.insecure to serve whoever reaches the port" -}}
{{- end -}}
{{- if not (or $values.models.volume $values.models.claim) -}}
{{- fail "models.claim: name a PersistentVolumeClaim, or give models.volume" -}}
{{- end -}}
{{- if and $values.models.download (not $values.models.volume) -}}
{{- fail "models.download: every pod would fetch into the one claim, together: give models.volume, a volume of each pod's own (emptyDir, hostPath), or fill the claim once by a Job of yours" -}}
{{- end -}}
{{- if and $values.huggingFace.existingSecret (not $values.models.download) -}}
{{- fail "huggingFace.existingSecret: is for models.download alone, and that is empty: pods that serve ask no hub; empty it, or give models.download" -}}
{{- end -}}
{{- if and $values.rayAuth.existingSecret (not $values.rayAuth.enabled) -}}
{{- fail "rayAuth.existingSecret: Ray asks for no token with rayAuth.enabled: false; empty it, or write true" -}}
{{- end -}}
{{- if and $values.gcsFaultTolerance.enabled (not $values.gcsFaultTolerance.redisAddress) -}}
{{- fail "gcsFaultTolerance.redisAddress: is required" -}}
{{- end -}}
{{- if and $values.gcsFaultTolerance.enabled $values.gcsFaultTolerance.externalStorageNamespace (ne $values.upgrade.type "None") -}}
{{- fail "gcsFaultTolerance.externalStorageNamespace: a second cluster beside the first (upgrade.type: NewCluster) would write to the same place in Redis; leave it empty, or write upgrade.type: None" -}}
{{- end -}}
{{- with $values.gcsFaultTolerance -}}
{{- if and .username .usernameKey -}}
{{- fail "gcsFaultTolerance: username contradicts usernameKey; empty one of them" -}}
{{- end -}}
{{- if and .enabled (or .username .usernameKey) (not .existingSecret) -}}
{{- fail "gcsFaultTolerance.existingSecret: name a Secret with the user's password, without which Ray takes no user name" -}}
{{- end -}}
{{- end -}}
{{- if and $values.ingress.enabled (hasKey (dig "http" dict $values.config) "num_replicas") -}}
{{- fail "config.http.num_replicas: doors have pods of their own, so their number is ingress.replicas; leave it out" -}}
{{- end -}}
{{- if and (gt (int $values.ingress.replicas) 1) (not $values.ingress.enabled) -}}
{{- fail (printf "ingress.replicas: there are no pods for the door with ingress.enabled: false, so it decides nothing: write config.http.num_replicas: %d instead, or enable them" (int $values.ingress.replicas)) -}}
{{- end -}}
{{- range $pool := list "head" "ingress" "target" "draft" -}}
{{- range $label, $_ := (index $values $pool).podLabels -}}
{{- if has $label (list "app.kubernetes.io/name" "app.kubernetes.io/part-of" "app.kubernetes.io/instance" "app.kubernetes.io/component") -}}
{{- fail (printf "%s.podLabels: %s is the chart's own, by which policies, budgets and Services find pods: take another" $pool $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $volumes := list "tmp" "shm" "compile-cache" "models" "api-keys" "tls" -}}
{{- range $values.extraVolumes -}}
{{- if has .name $volumes -}}
{{- fail (printf "extraVolumes: there is a volume %s already, of the chart's or of yours: take another name" .name) -}}
{{- end -}}
{{- $volumes = append $volumes .name -}}
{{- end -}}
{{- range $pool := list "head" "ingress" "target" "draft" -}}
{{- range $name, $_ := (index $values $pool).rayStartParams -}}
{{- if eq $name "labels" -}}
{{- fail (printf "%s.rayStartParams.labels: KubeRay refuses it where nobody looks; the pools' labels are the chart's" $pool) -}}
{{- else if or (eq $name "redis-username") (eq $name "redis-password") -}}
{{- fail (printf "%s.rayStartParams.%s: comes from gcsFaultTolerance" $pool $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $decided := include "drafthouse.decidedEnv" . | fromYaml -}}
{{- $environments := dict "extraEnv" $values.extraEnv -}}
{{- range $pool := list "head" "ingress" "target" "draft" -}}
{{- $_ := set $environments (printf "%s.extraEnv" $pool) (index $values $pool).extraEnv -}}
{{- end -}}
{{- range $place, $variables := $environments -}}
{{- range $variables -}}
{{- if not (get . "name") -}}
{{- fail (printf "%s: an entry has no name" $place) -}}
{{- end -}}
{{- if hasKey $decided .name -}}
{{- fail (printf "%s: %s %s" $place .name (get $decided .name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $doors := ternary (int $values.ingress.replicas) 0 (and $values.ingress.enabled (gt (int $values.ingress.replicas) 1)) -}}
{{- $rooms := dict "Ingress" $doors "Coordinator" (max (int $target.groups) (int $target.maxGroups)) -}}
{{- if include "drafthouse.hasDraftPool" . -}}
{{- $_ := set $rooms "DraftPool" (max (int $values.draft.workers) (int $values.draft.maxWorkers)) -}}
{{- end -}}
{{- $groupScaling := include "drafthouse.scaling" (dict "config" $values.config "pool" "target_groups") | fromYaml -}}
{{- $workerScaling := include "drafthouse.scaling" (dict "config" $values.config "pool" "draft_pool") | fromYaml -}}
{{- $mostGroups := get $groupScaling "max_groups" | int -}}
{{- if gt $mostGroups (get $rooms "Coordinator" | int) -}}
{{- fail (printf "config.cluster.target_groups.autoscaling: max_groups %d, but there are pods for %d: raise target.maxGroups" $mostGroups (get $rooms "Coordinator" | int)) -}}
{{- end -}}
{{- $mostWorkers := get $workerScaling "max_workers" | int -}}
{{- if and (hasKey $rooms "DraftPool") (gt $mostWorkers (get $rooms "DraftPool" | int)) -}}
{{- fail (printf "config.cluster.draft_pool.autoscaling: max_workers %d, but there are pods for %d: raise draft.maxWorkers" $mostWorkers (get $rooms "DraftPool" | int)) -}}
{{- end -}}
{{- $bounds := list (list "target_groups" "groups" "target.groups" (int $target.groups) $groupScaling) -}}
{{- if hasKey $rooms "DraftPool" -}}
{{- $bounds = append $bounds (list "draft_pool" "workers" "draft.workers" (int $values.draft.workers) $workerScaling) -}}
{{- end -}}
{{- range $bounds -}}
{{- $scaling := index . 4 -}}
{{- if $scaling -}}
{{- $kind := index . 1 -}}
{{- $least := dig (printf "min_%s" $kind) 1 $scaling | int -}}
{{- $most := get $scaling (printf "max_%s" $kind) | int -}}
{{- if gt $least $most -}}
{{- fail (printf "config.cluster.%s.autoscaling: min_%s %d is more than max_%s %d" (index . 0) $kind $least $kind $most) -}}
{{- end -}}
{{- if or (lt (index . 3) $least) (gt (index . 3) $most) -}}
{{- fail (printf "%s: %d are there at first, which is not from %d to %d, the bounds of config.cluster.%s.autoscaling" (index . 2) (index . 3) $least $most (index . 0)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $values.serve.deployments -}}
{{- if not (hasKey $rooms (toString .name)) -}}
{{- fail (printf "serve.deployments: there is no deployment %s here; known: %s" (toString .name) (keys $rooms | sortAlpha | join ", ")) -}}
{{- end -}}
{{- $bounds := get . "autoscaling_config" | default dict -}}
{{- $least := get $bounds "min_replicas" | default (ternary 0 1 (hasKey $bounds "min_replicas")) | int -}}
{{- $most := get $bounds "max_replicas" | default 0 | int -}}
{{- $pool := get (dict "Coordinator" "target_groups" "DraftPool" "draft_pool") .name -}}
{{- if and $pool (eq $least 0) -}}
{{- $kind := ternary "groups" "workers" (eq $pool "target_groups") -}}
{{- $scaling := ternary $groupScaling $workerScaling (eq $pool "target_groups") -}}
{{- if or (not $scaling) (ne (get $scaling (printf "min_%s" $kind) | default (ternary 0 1 (hasKey $scaling (printf "min_%s" $kind))) | int) 0) -}}
{{- fail (printf "serve.deployments: %s: min_replicas 0: the doors would not know that they have to wake one; write config.cluster.%s.autoscaling.min_%s: 0 (beside it, or instead)" .name $pool $kind) -}}
{{- end -}}
{{- end -}}
{{- if and $most (gt $least $most) -}}
{{- fail (printf "serve.deployments: %s: min_replicas %d is more than max_replicas %d" .name $least $most) -}}
{{- end -}}
{{- $room := get $rooms .name | int -}}
{{- $fewer := get (dict "Ingress" "ingress.replicas" "Coordinator" "target.groups" "DraftPool" "draft.workers") .name -}}
{{- $more := get (dict "Ingress" "ingress.replicas" "Coordinator" "target.maxGroups" "DraftPool" "draft.maxWorkers") .name -}}
{{- $fixed := dig "num_replicas" 0 . | int -}}
{{- if and $fixed (get . "autoscaling_config") -}}
{{- fail (printf "serve.deployments: %s: num_replicas %d contradicts autoscaling_config; leave one of them out" .name $fixed) -}}
{{- end -}}
{{- if and $room (gt $fixed $room) -}}
{{- fail (printf "serve.deployments: %s: num_replicas %d, but there are pods for %d: raise %s" .name $fixed $room $fewer) -}}
{{- end -}}
{{- if and $room (gt $most $room) -}}
{{- fail (printf "serve.deployments: %s: max_replicas %d, but there are pods for %d: raise %s" .name $most $room $more) -}}
{{- end -}}
{{- end -}}
{{- if and $values.tls.existingSecret (not $values.ingress.enabled) -}}
{{- fail "tls.existingSecret: needs ingress.enabled: KubeRay asks the head's own door by HTTP, and would leave it out" -}}
{{- end -}}
{{- if and $values.tls.existingSecret (eq $values.ingress.proxy "haproxy") -}}
{{- fail "ingress.proxy: haproxy does not end TLS; empty tls.existingSecret and end it in front (expose.tlsSecret), or write python" -}}
{{- end -}}
{{- if and $values.expose.enabled (not $values.expose.host) -}}
{{- fail "expose.host: is required" -}}
{{- end -}}
{{- end -}}
