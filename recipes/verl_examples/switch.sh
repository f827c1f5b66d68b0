#!/usr/bin/env bash
# One of verl's own example scripts with our keys behind its own; they win. In a checkout of verl, once for each job:
#   JOB=math COORDINATOR=tcp://10.0.0.1:5570 KEYS=/secure/mux_keys bash switch.sh examples/grpo_trainer/run_qwen3_8b_fsdp.sh [KEY=VALUE ...]
set -euo pipefail

# ---- yours to set ----
JOB="${JOB:?name of this job}"
COORDINATOR="${COORDINATOR:-tcp://127.0.0.1:5570}"
KEYS="${KEYS:-null}"                   # the folder that `verl-mux keys` made; not needed on the coordinator's own machine
ROLLOUT_NODE="${ROLLOUT_NODE:-rollout0}" TRAIN_NODE="${TRAIN_NODE:-train0}"   # of the coordinator's file
ROLLOUT_GPUS="${ROLLOUT_GPUS:-8}"
# ----------------------

script="${1:?the script of verl that is switched over}"
exec bash "${script}" \
  +mux=default trainer.v1.trainer_mode=mux_separate "trainer.experiment_name=${JOB}" \
  "mux.coordinator=${COORDINATOR}" "mux.keys=${KEYS}" "mux.nodes.rollout=[${ROLLOUT_NODE}]" "mux.nodes.train=[${TRAIN_NODE}]" \
  actor_rollout_ref.rollout.nnodes=1 "actor_rollout_ref.rollout.n_gpus_per_node=${ROLLOUT_GPUS}" "${@:2}"
