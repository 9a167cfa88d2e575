{{/*
The pod of one pool. Takes a dict: root, pool (its values), component (its name).
*/}}
{{- define "drafthouse.pod" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $pool := .pool -}}
metadata:
  labels:
    {{- include "drafthouse.podLabels" (dict "root" $root "component" .component) | nindent 4 }}
    {{- with $pool.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- $annotations := deepCopy $pool.podAnnotations }}
  {{- with $pool.tolerations }}
  {{- /* KubeRay leaves tolerations out where it looks for changes (others may add some): by themselves they would never arrive. */}}
  {{- $_ := set $annotations "checksum/tolerations" (toYaml . | sha256sum) }}
  {{- end }}
  {{- with $annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- /* The autoscaler beside the head needs rights, which KubeRay gives to an account that it makes itself. */}}
  {{- if not (and (eq .component "head") $values.autoscaling.enabled) }}
  serviceAccountName: {{ include "drafthouse.serviceAccountName" $root }}
  automountServiceAccountToken: false
  {{- end }}
  enableServiceLinks: false
  {{- $drain := include "drafthouse.drainSeconds" (dict "root" $root "pool" $pool) | int }}
  {{- /* Beside the drain: to ask for it, and to stop Ray. */}}
  terminationGracePeriodSeconds: {{ add $drain 60 }}
  securityContext: {{- toYaml $values.podSecurityContext | nindent 4 }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pool.priorityClassName }}
  priorityClassName: {{ quote . }}
  {{- end }}
  {{- with $pool.runtimeClassName }}
  runtimeClassName: {{ quote . }}
  {{- end }}
  {{- with $pool.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pool.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pool.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pool.topologySpreadConstraints }}
  topologySpreadConstraints: {{- toYaml . | nindent 4 }}
  {{- else }}
  {{- if ne .component "head" }}
  {{- /* So that a lost node takes as few doors, groups or draft workers with it as can be. */}}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "drafthouse.selectorLabels" $root | nindent 10 }}
          app.kubernetes.io/component: {{ .component }}
  {{- end }}
  {{- end }}
  {{- if $values.models.download }}
  initContainers:
    {{- range $index, $_ := $values.models.download }}
    - name: fetch-{{ $index }}-{{ .folder | lower | replace "." "-" | replace "_" "-" | trunc 46 | trimAll "-" }}
      image: {{ include "drafthouse.image" $root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      {{- /* KubeRay empties Redis in a pod like the head's, which has five minutes for all it does. */}}
      command: [bash, -c, '[ "$NODE_TYPE" = redis-cleanup ] || exec "$0" "$@"', hf, download, {{ .repository | quote }}, --revision, {{ .revision | quote }}, --local-dir, {{ printf "%s/%s" $values.models.mountPath .folder | quote }}]
      securityContext: {{- toYaml $values.securityContext | nindent 8 }}
      resources:
        requests: {cpu: 500m, memory: 1Gi}
        limits: {cpu: "2", memory: 4Gi}
      env: {{- include "drafthouse.fetchEnv" $root | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: models, mountPath: {{ quote $values.models.mountPath }}}
        {{- with $values.extraVolumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
    {{- end }}
  {{- end }}
  containers:
    - name: ray-{{ ternary "head" "worker" (eq .component "head") }}
      image: {{ include "drafthouse.image" $root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      securityContext: {{- toYaml $values.securityContext | nindent 8 }}
      ports:
        {{- if eq .component "head" }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        {{- end }}
        - {name: metrics, containerPort: 8080}
        {{- /* By its name the Service that clients ask finds the pods for the door. */}}
        - {name: {{ ternary "door" "serve" (eq .component "ingress") }}, containerPort: 8000}
      resources:
        {{- $amounts := dict "cpu" (toString $pool.cpu) "memory" $pool.memory }}
        {{- with $pool.ephemeralStorage }}{{ $_ := set $amounts "ephemeral-storage" . }}{{ end }}
        {{- if $pool.gpu }}{{ $_ := set $amounts $pool.gpuResource (toString $pool.gpu) }}{{ end }}
        requests: {{- toYaml $amounts | nindent 10 }}
        limits: {{- toYaml $amounts | nindent 10 }}
      env: {{- include "drafthouse.env" (list (include "drafthouse.rayEnv" . | fromYamlArray) $values.extraEnv $pool.extraEnv) | nindent 8 }}
      lifecycle:
        preStop:
          exec:
            command:
              - bash
              - -c
              - |
                {{- include "drafthouse.preStop" (dict "seconds" $drain "component" .component) | nindent 16 }}
      {{- with $pool.probes.liveness }}
      livenessProbe: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if $pool.probes.readiness }}
      readinessProbe: {{- toYaml $pool.probes.readiness | nindent 8 }}
      {{- else if and (eq .component "target") (include "drafthouse.hasPodsOfRanks" $root) }}
      readinessProbe:
        exec:
          command: [bash, -c, "wget --tries 1 -T 2 -q -O- http://localhost:52365/api/local_raylet_healthz | grep success"]
        initialDelaySeconds: 10
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 10
      {{- else if and $values.tls.existingSecret (ne .component "head") }}
      {{- /* KubeRay's own asks the proxy by HTTP; else this is the same. */}}
      readinessProbe:
        exec:
          command: [bash, -c, "wget --tries 1 -T 2 -q -O- http://localhost:52365/api/local_raylet_healthz | grep success && wget --no-check-certificate --tries 1 -T 2 -q -O- https://localhost:8000/-/healthz | grep success"]
        initialDelaySeconds: 10
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 1
      {{- end }}
      {{- with $pool.probes.startup }}
      startupProbe: {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        - {name: compile-cache, mountPath: /home/drafthouse}
        - {name: models, mountPath: {{ quote $values.models.mountPath }}, readOnly: true}
        {{- if $values.apiKeys.existingSecret }}
        - {name: api-keys, mountPath: /etc/drafthouse/api-keys, readOnly: true}
        {{- end }}
        {{- if $values.tls.existingSecret }}
        - {name: tls, mountPath: /etc/drafthouse/tls, readOnly: true}
        {{- end }}
        {{- with $values.extraVolumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
  volumes:
    - {name: tmp, emptyDir: {}}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $pool.shmSize }}}}
    - name: compile-cache
      {{- toYaml ($values.compileCache.volume | default (dict "emptyDir" dict)) | nindent 6 }}
    - name: models
      {{- toYaml ($values.models.volume | default (dict "persistentVolumeClaim" (dict "claimName" $values.models.claim "readOnly" true))) | nindent 6 }}
    {{- with $values.apiKeys.existingSecret }}
    {{- /* In every pod: the task that builds the application runs anywhere. */}}
    - name: api-keys
      secret:
        secretName: {{ quote . }}
        defaultMode: 0440
        items: [{key: {{ quote $values.apiKeys.key }}, path: keys}]
    {{- end }}
    {{- with $values.tls.existingSecret }}
    {{- /* In every pod: each has a proxy of Serve's. */}}
    - name: tls
      secret: {secretName: {{ quote . }}, defaultMode: 0440}
    {{- end }}
    {{- with $values.extraVolumes }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end -}}

{{/* The chart's own environment of a container of Ray. Takes what drafthouse.pod takes. */}}
{{- define "drafthouse.rayEnv" -}}
{{- $values := .root.Values -}}
- {name: HOME, value: /home/drafthouse}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- if not .pool.gpu }}
# A pod that asks for no GPU sees all of its node's where the image says so, and others have been given them.
- {name: NVIDIA_VISIBLE_DEVICES, value: void}
- {name: CUDA_VISIBLE_DEVICES, value: ""}
{{- end }}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
# At Ray's own niceness of 15 a round waits for whatever else runs on the node.
- {name: RAY_worker_niceness, value: "0"}
# Clients that do not read: the proxy gives them up (docs/operations/door.md, Overload).
- {name: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, value: "deploy.openai.slow_readers:proxy_middlewares"}
# A proxy that died is found out after three checks: half a minute at Serve's own ten seconds.
- {name: RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S, value: "2"}
# Deliveries from doors to the proxy: less CPU than Ray's generators of objects.
- {name: RAY_SERVE_PROXY_USE_GRPC, value: "1"}
# At gRPC's own 4 MiB a long answer would be a 500.
- {name: RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH, value: "2147483647"}
{{- if eq $values.ingress.proxy "haproxy" }}
- {name: RAY_SERVE_ENABLE_HA_PROXY, value: "1"}
- {name: RAY_SERVE_HAPROXY_BINARY_PATH, value: /opt/venv/bin/drafthouse-haproxy}
- {name: RAY_SERVE_HAPROXY_METRICS_PORT, value: "9101"}
- {name: RAY_SERVE_HAPROXY_STATS_PORT, value: "8404"}
# Streams keep their process when another takes over after a reload.
- {name: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S, value: "3600"}
- {name: RAY_SERVE_HAPROXY_MAXCONN, value: "4096"}
- {name: RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S, value: "3"}
{{- end }}
# A replica that hangs will not drain: the time that it is given would pass before its place is free.
- {name: RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS, value: "1"}
{{- if ne $values.logFormat "text" }}
- {name: DRAFTHOUSE_LOG_FORMAT, value: {{ $values.logFormat }}}
{{- end }}
{{- if $values.logsToStderr }}
# Else to files in /tmp, which end with the pod. Ray's own lines are many: its warnings alone.
- {name: RAY_LOG_TO_STDERR, value: "1"}
- {name: RAY_BACKEND_LOG_LEVEL, value: warning}
{{- end }}
{{- end -}}

{{/* The environment of a container that fetches a model. */}}
{{- define "drafthouse.fetchEnv" -}}
{{- $own := list (dict "name" "HOME" "value" "/tmp") -}}
{{- with .Values.huggingFace -}}
{{- if .existingSecret -}}
{{- $own = append $own (dict "name" "HF_TOKEN" "valueFrom" (dict "secretKeyRef" (dict "name" .existingSecret "key" .key))) -}}
{{- end -}}
{{- end -}}
{{- $nodeType := dict "name" "NODE_TYPE" "valueFrom" (dict "fieldRef" (dict "fieldPath" "metadata.labels['ray.io/node-type']")) -}}
{{- include "drafthouse.env" (list $own .Values.extraEnv (list $nodeType)) -}}
{{- end -}}

{{/*
Environment variables as Kubernetes takes them, each name once: a later one takes the place of an earlier one. Takes a list of
lists, the chart's own first.
*/}}
{{- define "drafthouse.env" -}}
{{- $names := list -}}
{{- $variables := dict -}}
{{- range . -}}
{{- range . -}}
{{- if not (hasKey $variables .name) -}}{{- $names = append $names .name -}}{{- end -}}
{{- $_ := set $variables .name . -}}
{{- end -}}
{{- end -}}
{{- $all := list -}}
{{- range $names -}}{{- $all = append $all (get $variables .) -}}{{- end -}}
{{- toYaml $all -}}
{{- end -}}

{{/*
What is done before a pod is stopped. Serve is told that Ray's node goes: it starts replicas elsewhere, where there is
room, and has those here serve their streams to the end; then the raylet ends by itself. Where nobody can be told, what
runs has the same time. Takes a dict: seconds, component.
*/}}
{{- define "drafthouse.preStop" -}}
{{- if or (eq .component "head") (eq (int .seconds) 0) -}}
sleep {{ .seconds }}
{{- else -}}
node=$(pgrep -a -x raylet | sed -n 's/.* --node_id=\([0-9a-f]*\) .*/\1/p')
end=$((SECONDS + {{ .seconds }}))
if [ -n "$node" ] && timeout 20 ray drain-node --address "$RAY_ADDRESS" --node-id "$node" \
    --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "the pod is stopped" \
    --deadline-remaining-seconds {{ .seconds }}; then
  while [ $SECONDS -lt $end ] && pgrep -x raylet > /dev/null; do sleep 1; done
else
  sleep {{ .seconds }}
fi
{{- end }}
ray stop
{{- end -}}

{{/* Bytes of Ray's object store. What does not fit into shmSize is a file on the node's disk: drafthouse.check refuses it. */}}
{{- define "drafthouse.objectStore" -}}536870912{{- end -}}

{{/*
A group of workers. Takes what drafthouse.pod takes, and replicas, min, max, hosts (pods that KubeRay starts and ends
together).
*/}}
{{- define "drafthouse.workerGroup" -}}
{{- $values := .root.Values -}}
groupName: {{ .component }}
replicas: {{ .replicas }}
minReplicas: {{ .min }}
maxReplicas: {{ .max }}
numOfHosts: {{ .hosts }}
{{- if $values.autoscaling.enabled }}
idleTimeoutSeconds: {{ int64 $values.autoscaling.idleTimeoutSeconds }}
{{- end }}
labels: {pool: {{ .component }}}
rayStartParams:
  {{- $params := dict "num-cpus" (toString .pool.cpu) "num-gpus" (toString (default 0 .pool.gpu)) "disable-usage-stats" "true" "object-store-memory" (include "drafthouse.objectStore" .root) }}
  {{- toYaml (mergeOverwrite $params (deepCopy .pool.rayStartParams)) | nindent 2 }}
template: {{- include "drafthouse.pod" . | nindent 2 }}
{{- end -}}
