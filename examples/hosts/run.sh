#!/usr/bin/env bash
# sudo bash examples/hosts/run.sh DIR [RUN_FILE]: makes three hosts out of Linux namespaces, starts a Ray cluster over them and an agent on
# each, submits the jobs of examples/hosts.yaml to it, and unmakes the hosts.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="${PYTHON:-python}"
dir="$1" file="${2:-${here}/../hosts.yaml}"
trap '"${python}" "${here}/bed.py" unmake' EXIT
"${python}" "${here}/bed.py" make hosta hostb hostc --share "${dir}"
"${python}" "${here}/../../recipes/cluster/clusters.py" "${file}" --dir "${dir}" --via "${python} ${here}/bed.py enter {host}" \
  --at-once 1 --ray "--num-cpus=32 --object-store-memory=100000000" \
  -- "${python}" -m verl_mux run "${file}" --dir "${dir}" --submit http://10.77.0.254:20002
