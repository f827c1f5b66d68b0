#!/usr/bin/env bash
# Slurm: one allocation, several jobs in it.   sbatch recipes/cluster/slurm.sh
# Jobs that share GPUs must be in one allocation, since Slurm hands GPUs out whole. Set partition and account as yours ask for.
#SBATCH --job-name=verl_mux
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
# Ctrl-C for the run, two minutes before the end, so that checkpoints are whole.
#SBATCH --signal=B:INT@120
set -euo pipefail

# ---- yours to set ----
RECIPE="${RECIPE:-${SLURM_SUBMIT_DIR:-.}/recipes/cluster}" # Slurm runs a copy of this script
DIR="${DIR:-${SLURM_SUBMIT_DIR:-.}/runs/cluster}"          # on a file system that all hosts see
# ----------------------

mapfile -t hosts < <(scontrol show hostnames "${SLURM_JOB_NODELIST}")
mkdir -p "${DIR}"
bind="$(getent ahostsv4 "$(hostname)" | awk '$1 !~ /^127\./ {print $1; exit}')"
bash "${RECIPE}/fill.sh" "${RECIPE}/jobs.yaml" "${bind}" "${DIR}" "${hosts[@]}" >"${DIR}/run.yaml"
via="srun --overlap --nodes=1 --ntasks=1 --quiet --nodelist={host} --"
python "${RECIPE}/clusters.py" "${DIR}/run.yaml" --via "${via}" -- \
  verl-mux run "${DIR}/run.yaml" --submit "http://${bind}:20002" --resume &
launcher=$!
trap 'kill -INT "${launcher}"' INT TERM
# The first wait ends with the signal, the second when the jobs have ended.
wait "${launcher}" || wait "${launcher}"
