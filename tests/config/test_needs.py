"""A job that leaves its nodes to the coordinator: the keys that say so, and what it tells about itself."""

import json

import pytest
from omegaconf import OmegaConf

from tests.config.test_schema import refusal, verl_config
from verl_mux.config.job_checks import load
from verl_mux.config.preflight import host_memory_of, needs_of
from verl_mux.memory.certificate.job import read_job

ADDRESS = "tcp://127.0.0.1:5570"
MODEL = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 1000, "num_attention_heads": 4}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def whole_config(model):
    config = verl_config({"coordinator": ADDRESS, "nodes": "auto"})
    more = {
        "data": {"train_batch_size": 16, "max_prompt_length": 32, "max_response_length": "${.max_prompt_length}"},
        "actor_rollout_ref": {"model": {"path": str(model)}, "rollout": {"n": 4, "dtype": "float32"}, "actor": {"ppo_epochs": 2}},
    }
    return OmegaConf.merge(config, more)


def test_auto_stands_for_nodes_that_the_coordinator_chooses():
    mux = load(verl_config({"coordinator": ADDRESS, "nodes": "auto", "slo": 1.5}))
    assert (mux.nodes.rollout, mux.nodes.train, mux.slo) == (["auto"], ["auto"], 1.5)


@pytest.mark.parametrize(
    ("mux", "words"),
    [
        ({"nodes": "auto"}, "mux.coordinator is not set"),
        ({"nodes": {"rollout": ["auto"], "train": ["t0"]}, "coordinator": ADDRESS}, "chooses both (mux.nodes=auto) or none"),
        ({"nodes": "auto", "coordinator": ADDRESS, "slo": 0.5}, "mux.slo=0.5 is not possible; allowed: float | None, 1 or more"),
        ({"nodes": "any"}, "mux.nodes is 'any'"),
        ({"profiled": {"rollout": [1.0], "train": [1.0]}}, "mux.profiled has 1 rollouts and 1 training phases"),
        ({"profiled": {"rollout": [1.0, 1.0, 1.0], "train": []}}, "mux.profiled has 3 rollouts and 0 training phases"),
    ],
)
def test_what_contradicts_it_is_refused(mux, words):
    assert words in refusal(verl_config(mux))


def test_a_colocated_job_needs_the_trainers_nodes_for_its_rollouts_too(model):
    config = whole_config(model)
    config.trainer.v1.trainer_mode, config.actor_rollout_ref.rollout.nnodes = "mux_colocate", 0
    needs = needs_of(config)
    assert (needs.rollout_nodes, needs.rollout_gpus) == (needs.train_nodes, needs.train_gpus)


def test_a_job_tells_what_a_step_computes(model):
    needs = needs_of(whole_config(model))
    assert (needs.responses, needs.prompt_tokens, needs.response_tokens) == (64, 32, 32)
    assert (needs.rollout_gpus, needs.train_gpus, needs.replica_gpus, needs.updates, needs.weight_bytes) == (8, 8, 2, 2, 4)
    assert needs.model.hidden_size == 64


def test_overrides_of_the_model_config_count(model):
    config = OmegaConf.merge(whole_config(model), {"actor_rollout_ref": {"model": {"override_config": {"num_hidden_layers": 9}}}})
    assert needs_of(config).model.num_hidden_layers == 9


def test_a_model_without_a_config_is_refused_by_its_path(tmp_path):
    assert f"actor_rollout_ref.model.path={tmp_path}" in refusal(whole_config(tmp_path), needs_of)


def test_a_job_tells_what_its_states_take_on_each_node_of_a_side(model):
    config = OmegaConf.merge(whole_config(model), {"actor_rollout_ref": {"rollout": {"nnodes": 1}}})
    told = host_memory_of(config)
    job = read_job(OmegaConf.to_container(config, resolve=True), MODEL)
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    assert told["train"]["optimizer"] == 8 * job.model.total * config.trainer.n_gpus_per_node // ranks
    assert told["train"]["parameters"] == 4 * job.model.total * config.trainer.n_gpus_per_node // ranks
    assert told["rollout"]["synced"] == job.model.total * job.engine.bytes


def test_of_a_model_that_the_formulas_do_not_know_nothing_is_told(model):
    config = whole_config(model)
    (model / "config.json").write_text(json.dumps({**MODEL, "kv_lora_rank": 512}))
    assert host_memory_of(config) == {}
    config.actor_rollout_ref.model.path = str(model / "nowhere")
    assert host_memory_of(config) == {}
