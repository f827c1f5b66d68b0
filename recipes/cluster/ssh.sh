#!/usr/bin/env bash
# Plain hosts that this machine reaches by ssh without a password:
#   BIND=10.0.0.1 DIR=/shared/runs/cluster bash recipes/cluster/ssh.sh gpu-01 gpu-02
set -euo pipefail

# ---- yours to set ----
BIND="${BIND:?address of this machine, as the hosts reach it}"
DIR="${DIR:?folder that all hosts see}"
# ----------------------

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
mkdir -p "${DIR}"
bash "${here}/fill.sh" "${here}/jobs.yaml" "${BIND}" "${DIR}" "$@" >"${DIR}/run.yaml"
# A host that does not answer for two minutes is lost; a link that comes back before is not noticed.
via="ssh -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 -o ServerAliveCountMax=8 -- {host}"
exec python "${here}/clusters.py" "${DIR}/run.yaml" --via "${via}" -- \
  verl-mux run "${DIR}/run.yaml" --submit "http://${BIND}:20002"
