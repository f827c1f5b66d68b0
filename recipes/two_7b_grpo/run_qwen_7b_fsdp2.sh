#!/usr/bin/env bash
# One of the two jobs. Start `verl-mux coordinator --config recipes/two_7b_grpo/pools.yaml` first, then this once per job:
#   JOB=math  TRAIN_FILES=... VAL_FILES=... bash recipes/two_7b_grpo/run_qwen_7b_fsdp2.sh
#   JOB=code  TRAIN_FILES=... VAL_FILES=... bash recipes/two_7b_grpo/run_qwen_7b_fsdp2.sh
set -euo pipefail

# ---- yours to set ----
JOB="${JOB:?name of this job}"
TRAIN_FILES="${TRAIN_FILES:?parquet file of training prompts}"
VAL_FILES="${VAL_FILES:?parquet file of validation prompts}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}"
COORDINATOR="${COORDINATOR:-tcp://127.0.0.1:5570}"
KEYS="${KEYS:-null}"   # the folder that `verl-mux keys` made; not needed on the coordinator's own machine
# ----------------------

MUX=("mux.job=${JOB}" "mux.coordinator=${COORDINATOR}" "mux.keys=${KEYS}")
DATA=("data.train_files=${TRAIN_FILES}" "data.val_files=${VAL_FILES}")
MODEL=("actor_rollout_ref.model.path=${MODEL_PATH}")

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
exec python -m verl.trainer.main_ppo --config-dir "${here}" --config-name qwen_7b_grpo "${MUX[@]}" "${DATA[@]}" "${MODEL[@]}" "$@"
