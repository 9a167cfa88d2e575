{{/*
The Serve config. What the pools decide is merged over `config`: one fact, one place.
*/}}
{{- define "drafthouse.serveConfig" -}}
{{- $values := .Values -}}
{{- $target := $values.target -}}
{{- $draft := $values.draft -}}
{{- $ranks := include "drafthouse.targetRanks" . | int -}}
{{- $stages := dig "target" "pipeline_parallel_size" 1 $values.config | int -}}
{{- $nodes := int $target.nodesPerGroup -}}
{{- $strategy := "PACK" -}}
{{- if eq $nodes 1 -}}{{- $strategy = "STRICT_PACK" -}}
{{- else if eq $nodes $stages -}}{{- $strategy = "STRICT_SPREAD" -}}
{{- end -}}
{{- $targetBundle := dict "num_cpus" (include "drafthouse.cpusEach" (dict "cpus" (mul $target.cpu $nodes) "ranks" $ranks) | float64) "num_gpus" (ternary 1 0 (gt (int $target.gpu) 0)) "labels" (dict "pool" "target") -}}
{{- $cluster := dict "check_resources" false "channels" (dict "bind" "node")
    "target_groups" (dict "num_groups" $target.groups "bundle" $targetBundle "strategy" $strategy) -}}
{{- if eq (include "drafthouse.updates" .) "surge" -}}
{{- $_ := set $cluster "updates" "surge" -}}
{{- end -}}
{{- if gt $nodes $stages -}}
{{- /* A stage is larger than a pod. The application would else ask Ray for one node with all of its ranks. */ -}}
{{- $_ := set $cluster.target_groups "tensor_parallel_across_nodes" true -}}
{{- end -}}
{{- if include "drafthouse.hasDraftPool" . -}}
{{- $draftRanks := dig "speculative_config" "draft_tensor_parallel_size" 1 $values.config | int -}}
{{- $draftBundle := dict "num_cpus" (include "drafthouse.cpusEach" (dict "cpus" $draft.cpu "ranks" $draftRanks) | float64) "num_gpus" (ternary 1 0 (gt (int $draft.gpu) 0)) "labels" (dict "pool" "draft") -}}
{{- $_ := set $cluster "draft_pool" (dict "num_workers" $draft.workers "bundle" $draftBundle) -}}
{{- end -}}
{{- $decided := dict "cluster" $cluster -}}
{{- if $values.apiKeys.existingSecret -}}
{{- $_ := set $decided "http" (dict "api_keys_file" "/etc/drafthouse/api-keys/keys") -}}
{{- end -}}
{{- $config := mergeOverwrite (deepCopy $values.config) $decided -}}
{{- $deployments := list -}}
{{- if $values.ingress.enabled -}}
{{- $door := dict "name" "Ingress" "num_replicas" $values.ingress.replicas "ray_actor_options" (dict "num_cpus" 0 "label_selector" (dict "pool" "ingress")) -}}
{{- if gt (int $values.ingress.replicas) 1 -}}
{{- /* Two doors on one pod would leave the next pod without any, never to be ready. An update then has no room beside them. */ -}}
{{- $door = merge $door (dict "max_replicas_per_node" 1 "max_surge_percent" 0) -}}
{{- end -}}
{{- range $values.serve.deployments -}}
{{- if eq .name "Ingress" -}}
{{- $door = mergeOverwrite $door (deepCopy .) -}}
{{- /* Serve takes a number of replicas or bounds for it. */ -}}
{{- if and (get . "autoscaling_config") (not (get . "num_replicas")) -}}{{- $door = omit $door "num_replicas" -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- $deployments = append $deployments $door -}}
{{- end -}}
{{- range $values.serve.deployments -}}
{{- if not (and (eq .name "Ingress") $values.ingress.enabled) -}}{{- $deployments = append $deployments . -}}{{- end -}}
{{- end -}}
{{- $application := dict "name" "drafthouse" "route_prefix" "/" "import_path" "deploy.serve_config:build"
    "args" (dict "config" $config "insecure" $values.apiKeys.insecure) -}}
{{- if include "drafthouse.areModelsEverywhere" . -}}{{- $_ := set $application.args "models_everywhere" true -}}{{- end -}}
{{- if $deployments -}}{{- $_ := set $application "deployments" $deployments -}}{{- end -}}
{{- if $values.serve.autoscalingPolicy -}}{{- $_ := set $application "autoscaling_policy" $values.serve.autoscalingPolicy -}}{{- end -}}
proxy_location: EveryNode
http_options:
  host: {{ ternary "0.0.0.0" (quote $values.serve.host) (eq $values.serve.host "0.0.0.0") }}
  port: 8000
  {{- if $values.tls.existingSecret }}
  ssl_keyfile: /etc/drafthouse/tls/tls.key
  ssl_certfile: /etc/drafthouse/tls/tls.crt
  {{- end }}
  keep_alive_timeout_s: {{ dig "http" "keep_alive_timeout_s" 75 $values.config | int64 }}
logging_config:
  log_level: {{ $values.serve.logLevel }}
  enable_access_log: false
  {{- if eq $values.logFormat "json" }}
  encoding: JSON
  {{- end }}
applications:
  - {{- $application | toYaml | nindent 4 }}
{{- end -}}
