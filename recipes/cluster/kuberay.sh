#!/usr/bin/env bash
# KubeRay: one pod per node, and the jobs' own Ray clusters in the pods.   bash recipes/cluster/kuberay.sh
# Run it in the head pod, where `kubectl` may `exec` into the worker pods.
set -euo pipefail

# ---- yours to set ----
BIND="${BIND:?address of this pod, as the others reach it}"
DIR="${DIR:?folder on the volume that all pods see}"
CLUSTER="${CLUSTER:-verl-mux}"
# ----------------------

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
workers="ray.io/cluster=${CLUSTER},ray.io/node-type=worker"
kubectl apply -f "${here}/raycluster.yaml"
kubectl wait --for=condition=Ready pod --selector="${workers}" --timeout=30m
mapfile -t pods < <(kubectl get pods --selector="${workers}" -o jsonpath='{range .items[*]}{.metadata.name}{"\n"}{end}')
mkdir -p "${DIR}"
bash "${here}/fill.sh" "${here}/jobs.yaml" "${BIND}" "${DIR}" "${pods[@]}" >"${DIR}/run.yaml"
exec python "${here}/clusters.py" "${DIR}/run.yaml" --via "kubectl exec --stdin {host} --" -- verl-mux run "${DIR}/run.yaml"
