#!/usr/bin/env bash
# sudo bash examples/hosts/run.sh DIR [RUN_FILE]: makes three hosts out of Linux namespaces, starts the Ray cluster of each job and an
# agent on each host, runs examples/hosts.yaml on them, and unmakes the hosts.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="${PYTHON:-python}"
dir="$1" file="${2:-${here}/../hosts.yaml}"
trap '"${python}" "${here}/bed.py" unmake' EXIT
"${python}" "${here}/bed.py" make hosta hostb hostc --share "${dir}"
"${python}" "${here}/../../recipes/cluster/clusters.py" "${file}" --dir "${dir}" --via "${python} ${here}/bed.py enter {host}" \
  --at-once 1 --ray "--num-cpus=32 --object-store-memory=100000000" -- "${python}" -m verl_mux run "${file}" --dir "${dir}"
