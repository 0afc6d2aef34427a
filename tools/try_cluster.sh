#!/usr/bin/env bash
# Try the chart on a kind cluster of its own, in about ten minutes, and print a line for each step.
#
#   tools/try_cluster.sh                                   build both images with docker
#   tools/try_cluster.sh GATEWAY_IMAGE WORKER_IMAGE        REPOSITORY:TAG of two images that docker has
#   tools/try_cluster.sh values                            print the values that it installs, and do nothing else
#
# Needs kind, kubectl, helm 3 or 4, docker and curl. A build needs the place of torch's CPU wheels, as in
# docs/kubernetes.md: PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS. Other variables: MODEL, a small model of the hub;
# KEEP=1, which leaves the cluster; CLUSTER, its name. Exits with 1 when a step has failed.
set -uo pipefail

CLUSTER=${CLUSTER:-headstart-try}
MODEL=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}
NAMESPACE=headstart-try
RELEASE=try
PREFIX=$RELEASE-headstart
WAIT=5m
ROOT=$(cd "$(dirname "$0")/.." && pwd)
CHART=$ROOT/helm/headstart
GATEWAY_IMAGE=headstart-gateway:try
WORKER_IMAGE=headstart-worker:try
BUILD=1
FAILED=0
FORWARD=

values() {
  cat <<VALUES
apiKeys: {enabled: true}
gateway:
  image: {repository: "${GATEWAY_IMAGE%:*}", tag: "${GATEWAY_IMAGE##*:}"}
  drain: {noticeSeconds: 2, timeoutSeconds: 30}
  resources: {requests: {cpu: 100m, memory: 256Mi}}
worker:
  image: {repository: "${WORKER_IMAGE%:*}", tag: "${WORKER_IMAGE##*:}"}
  replicas: 2
  options: {threads: 1, kv-cache-memory: 256M}
  startupTimeoutSeconds: 600
  drain: {timeoutSeconds: 30}
  resources: {requests: {cpu: 250m, memory: 1Gi}, limits: {memory: 3Gi}}
redis:
  builtin: {memoryMiB: 64, cpuRequest: 50m}
models:
  - name: tiny
    source: $MODEL
VALUES
}

kube() { kubectl --context "kind-$CLUSTER" --namespace "$NAMESPACE" "$@"; }
chart() { helm --kube-context "kind-$CLUSTER" --namespace "$NAMESPACE" "$@"; }
stop_forward() {
  if [ -n "$FORWARD" ]; then
    kill "$FORWARD" 2>/dev/null
    wait "$FORWARD" 2>/dev/null
  fi
  FORWARD=
}

finish() {
  local status=$?
  trap - EXIT
  stop_forward
  if [ "${CREATED:-0}" = 1 ]; then
    if [ "${KEEP:-0}" = 1 ]; then
      echo "The cluster stays: kind delete cluster --name $CLUSTER"
    else
      kind delete cluster --name "$CLUSTER" >"$WORK/delete.log" 2>&1 || status=1
    fi
  fi
  if [ "$FAILED" = 1 ]; then status=1; fi
  if [ "$status" = 0 ]; then rm -rf "$WORK"; else echo "The output of each step is in $WORK."; fi
  exit "$status"
}

# step NAME COMMAND...: one line of the report. The reason of a failure is the last line that the command printed.
step() {
  local name=$1 begin=$SECONDS log
  shift
  log=$WORK/$(printf '%s' "$name" | tr -c 'A-Za-z0-9\n' '-').log
  if "$@" >"$log" 2>&1; then
    printf 'ok      %4d s  %s\n' $((SECONDS - begin)) "$name"
    return 0
  fi
  FAILED=1
  printf 'failed  %4d s  %s: %s\n' $((SECONDS - begin)) "$name" "$(grep -v '^[[:space:]]*$' "$log" | tail -n 1)"
  return 1
}

# must NAME COMMAND...: a step without which the others mean nothing.
must() {
  step "$@" && return
  if [ "${CREATED:-0}" = 1 ]; then
    { kube get pods,events --output wide; kube describe pods; kube logs --selector "app.kubernetes.io/instance=$RELEASE" \
      --all-containers --prefix --tail 50; } >"$WORK/cluster.log" 2>&1
  fi
  exit 1
}

tools_are_there() {
  local tool missing=
  for tool in kind kubectl helm docker curl; do
    command -v "$tool" || missing="$missing $tool"
  done
  [ -z "$missing" ] || { echo "install$missing, and put them on PATH"; return 1; }
  docker info || { echo "docker does not answer"; return 1; }
  if kind get clusters 2>/dev/null | grep -qx "$CLUSTER"; then
    echo "a cluster $CLUSTER exists; delete it, or name another one in CLUSTER"
    return 1
  fi
}

build() {
  if [ -z "${PIP_EXTRA_INDEX_URL:-}${PIP_FIND_LINKS:-}" ]; then
    echo "set PIP_EXTRA_INDEX_URL to an index of torch's CPU wheels, or name two images"
    return 1
  fi
  docker build --target gateway --tag "$GATEWAY_IMAGE" "$ROOT" &&
    docker build --target worker --build-arg DEVICE=cpu --build-arg PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL:-}" \
      --build-arg PIP_FIND_LINKS="${PIP_FIND_LINKS:-}" --tag "$WORKER_IMAGE" "$ROOT"
}

make_namespace() {
  kubectl --context "kind-$CLUSTER" create namespace "$NAMESPACE" &&
    kubectl --context "kind-$CLUSTER" label namespace "$NAMESPACE" pod-security.kubernetes.io/enforce=restricted \
      pod-security.kubernetes.io/enforce-version=latest
}

unrestricted_pod_is_refused() {
  local answer
  answer=$(kube run unrestricted --image "$GATEWAY_IMAGE" --restart Never --dry-run=server 2>&1)
  case $answer in *"violates PodSecurity"*) return 0 ;; esac
  echo "it was not refused for its privileges: $answer"
  return 1
}

install() { chart install "$RELEASE" "$CHART" --values "$WORK/values.yaml" --wait --timeout 10m; }
upgrade() { chart upgrade "$RELEASE" "$CHART" --values "$WORK/values.yaml" --wait --timeout 10m "$@"; }

pods_are_ready() {
  kube rollout status "deployment/$PREFIX-gateway" --timeout "$WAIT" &&
    kube rollout status "statefulset/$PREFIX-tiny" --timeout "$WAIT" &&
    kube rollout status "statefulset/$PREFIX-redis" --timeout "$WAIT"
}

# The way that the chart's notes show: a forwarded port, and the generated key.
chat() {
  local key port tries=0
  key=$(kube get secret "$PREFIX-api-keys" --output 'jsonpath={.data.api-key}' | base64 -d) || return 1
  stop_forward
  kubectl --context "kind-$CLUSTER" --namespace "$NAMESPACE" port-forward "service/$PREFIX-gateway" :80 \
    >"$WORK/forward" 2>&1 & # no function: its shell would be stopped in place of kubectl
  FORWARD=$!
  until port=$(sed -n 's/^Forwarding from 127\.0\.0\.1:\([0-9]*\) .*/\1/p' "$WORK/forward") && [ -n "$port" ]; do
    tries=$((tries + 1))
    if [ "$tries" -gt 60 ]; then
      echo "kubectl forwards no port: $(tail -n 1 "$WORK/forward")"
      return 1
    fi
    sleep 0.5
  done
  curl --silent --show-error --max-time 120 --output "$WORK/answer" --write-out '%{http_code}\n' \
    --header "authorization: Bearer $key" --header 'content-type: application/json' \
    --data '{"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello!"}]}' \
    "http://127.0.0.1:$port/v1/chat/completions" >"$WORK/code"
  stop_forward
  cat "$WORK/answer"
  if [ "$(cat "$WORK/code")" != 200 ] || ! grep -q '"completion_tokens"' "$WORK/answer"; then
    echo
    echo "no answer: HTTP $(cat "$WORK/code")"
    return 1
  fi
}

upgrade_changes_the_gateways() {
  upgrade --set gateway.options.access-log=true && pods_are_ready || return 1
  if ! kube get deployment "$PREFIX-gateway" --output 'jsonpath={.spec.template.spec.containers[0].args}' |
    grep -q -- --access-log; then
    echo "the gateways lack --access-log"
    return 1
  fi
}

scale() {
  upgrade --set gateway.options.access-log=true --set "worker.replicas=$1" && pods_are_ready || return 1
  becomes "$1" workers || { echo "there are $(workers) workers"; return 1; }
}

# becomes VALUE COMMAND...: wait a minute until the command prints the value.
becomes() {
  local expected=$1 tries=0
  shift
  until [ "$("$@")" = "$expected" ]; do
    tries=$((tries + 1))
    if [ "$tries" -gt 60 ]; then return 1; fi
    sleep 1
  done
}

# The pods that exist, those that still end included.
workers() { kube get pods --selector headstart/model=tiny --output name | wc -l | tr -d ' '; }

remains() {
  kube get all,secrets,configmaps,serviceaccounts,networkpolicies,poddisruptionbudgets,persistentvolumeclaims \
    --selector "app.kubernetes.io/instance=$RELEASE" --output name
}

nothing_is_left() {
  becomes "" remains || { echo "left: $(remains | tr '\n' ' ')"; return 1; }
}

case $# in
  0) ;;
  1) if [ "$1" = values ]; then values; exit; fi
     sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  2) GATEWAY_IMAGE=$1 WORKER_IMAGE=$2 BUILD=0
     case "${1##*/}${2##*/}" in *:*:*) ;; *) echo "name each image with its tag: REPOSITORY:TAG" >&2; exit 2 ;; esac ;;
  *) sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac

WORK=$(mktemp -d)
trap finish EXIT
trap 'exit 130' INT TERM
values >"$WORK/values.yaml"
must "the programs it needs are there" tools_are_there
if [ "$BUILD" = 1 ]; then must "both images build" build; fi
CREATED=1
must "a cluster starts" kind create cluster --name "$CLUSTER" --wait 3m
must "the cluster has the images" kind load docker-image --name "$CLUSTER" "$GATEWAY_IMAGE" "$WORKER_IMAGE"
must "a namespace enforces restricted pods" make_namespace
step "an unrestricted pod is refused there" unrestricted_pod_is_refused
must "the chart installs" install
must "all pods are ready" pods_are_ready
step "helm test passes" chart test "$RELEASE" --timeout "$WAIT"
step "a chat is answered" chat
step "an upgrade changes the gateways" upgrade_changes_the_gateways
step "a chat is answered after it" chat
step "workers scale from 2 to 3" scale 3
step "workers scale from 3 to 1" scale 1
step "a chat is answered by one worker" chat
must "the chart is uninstalled" chart uninstall "$RELEASE" --wait --timeout "$WAIT"
step "nothing of it is left" nothing_is_left
