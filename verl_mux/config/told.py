"""Which of a job's keys its event log says: those that the report's advice reasons about."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

KEYS = (
    "trainer.v1.trainer_mode",
    "trainer.v1.sampler.max_off_policy_threshold",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.nnodes",
    "actor_rollout_ref.rollout.n_gpus_per_node",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.max_num_seqs",
    *(f"mux.rollout.oversample.{key}" for key in ("rate", "max_cuts")),
    *(f"mux.rollout.segments.{key}" for key in ("segment_length", "max_segments", "max_length", "treatment")),
    *(f"mux.rollout.dispatch.{key}" for key in ("order", "predictor")),
    *(f"mux.rollout.{key}" for key in ("max_lag", "max_lag_strategy", "tail", "migration", "growth.own")),
)


def told(config: DictConfig) -> list[str]:
    """`key=value` of each of KEYS that is there and not null."""
    values = {key: OmegaConf.select(config, key) for key in KEYS}
    return [f"{key}={value}" for key, value in values.items() if value is not None]
