"""Bad keys end a job before Ray starts: one line on stderr, exit code 2, and verl's own checks never run.

What a job says of itself to its coordinator; a job that joins a Ray cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")
pytest.importorskip("ray")
from tests.config.test_schema import refusal, verl_config
from verl_mux.config import preflight
from verl_mux.config.job_checks import load
from verl_mux.config.preflight import host_memory_of, needs_of
from verl_mux.config.validation_hook import checked_first
from verl_mux.coordinator.bus.client import LocalMux, connect
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.server import Coordinator
from verl_mux.errors import UserError
from verl_mux.memory.certificate.job import read_job
from verl_mux.warm.engine_processes import VARIABLE

POOLS = {"rollout": {"nodes": [{"name": "r0", "gpus": 8}]}, "train": {"nodes": [{"name": "t0", "gpus": 8}]}}
NODES = {"rollout": ["r0"], "train": ["t0"]}


@pytest.fixture
def coordinator():
    with Coordinator(make_config({"pools": POOLS})) as served:
        yield served


@pytest.fixture
def check(monkeypatch, tmp_path):
    """Runs our preflight before a stand-in of verl's validation; says whether that was reached."""
    monkeypatch.delenv(UID_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    reached = []

    def run(config) -> bool:
        checked_first(lambda config, *args, **kwargs: reached.append(config))(config)
        return reached[-1:] == [config]

    return run


@pytest.fixture
def refused(check, capsys):
    """The line with which our preflight refuses a config."""

    def line(config) -> str:
        with pytest.raises(SystemExit) as ended:
            check(config)
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("verl-mux: ")
        return line

    return line


def job(address: str | None, **mux):
    config = verl_config({"coordinator": address, "nodes": NODES, **mux})
    config.trainer.total_training_steps = 3
    config.trainer.default_local_dir = "checkpoints/exp"
    return config


def test_a_job_that_the_coordinator_would_take_goes_on_to_verls_own_checks_and_leaves_no_job_behind(check, coordinator):
    assert check(job(coordinator.address))
    assert [j for j in coordinator.snapshot()["jobs"].values() if j["state"] == "live"] == []


@pytest.mark.parametrize(
    ("mux", "words"),
    [
        ({"nodes": {"rollout": ["r7"], "train": ["t0"]}}, ["'r7'", "no pool or node", "rollout (r0), train (t0)"]),
        ({"seeed": 1}, ["unknown key mux.seeed", "seeded_sampling"]),
        ({"coordinator": "localhost"}, ["localhost"]),
        ({"coordinator": "5570"}, ["5570"]),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(refused, coordinator, mux, words):
    text = refused(job(coordinator.address, **mux))
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("actor_rollout_ref.model.path", "/no/model"),
        ("data.train_files", "no/train.parquet"),
        ("reward.custom_reward_function.path", "~/no/reward.py"),
    ],
)
def test_a_file_that_is_not_here_is_found_before_ray_starts(refused, check, coordinator, monkeypatch, key, path):
    config = job(coordinator.address)
    OmegaConf.update(config, key, path, force_add=True)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert refused(config) == f"verl-mux: {key}={path}: there is no such file or folder on this machine"
    for elsewhere in ("hdfs://there/file", "pkg://package.module", "/no/part-*.parquet"):
        OmegaConf.update(config, key, elsewhere)
        assert check(config)


def test_what_a_data_set_class_of_the_users_takes_is_no_file_of_ours(check, coordinator, tmp_path):
    config = job(coordinator.address)
    (tmp_path / "dataset.py").touch()
    OmegaConf.update(config, "data.train_files", "maker/problems", force_add=True)
    OmegaConf.update(config, "data.custom_cls.path", "dataset.py", force_add=True)
    assert check(config)


def test_an_engine_that_this_environment_has_not(refused, coordinator, monkeypatch):
    monkeypatch.setattr(preflight, "installed", list)
    assert f"rollout.name=sglang: sglang is not installed in the environment {sys.prefix}" in refused(job(coordinator.address))


def test_a_coordinator_that_does_not_answer(refused, monkeypatch):
    monkeypatch.setattr(preflight, "_TIMEOUT_S", 1)
    text = refused(job("tcp://127.0.0.1:1"))
    assert "tcp://127.0.0.1:1" in text and "1 s" in text


def test_more_gpus_than_the_node_has(refused, coordinator):
    config = job(coordinator.address)
    config.actor_rollout_ref.rollout.n_gpus_per_node = 16
    text = refused(config)
    assert "16 GPUs" in text and "'r0'" in text and "8" in text


def test_two_jobs_of_one_name(refused, coordinator):
    with contextlib.closing(connect(coordinator.address, "exp", NODES, uid="exp:first", timeout=20)):
        text = refused(job(coordinator.address))
    assert "'exp' is running" in text and "unique" in text


def test_a_stock_mode_is_none_of_our_business(check):
    config = verl_config(None, trainer__v1__trainer_mode="sync")
    before = config.copy()
    assert check(config) and config == before


def test_a_second_job_does_not_go_on_from_the_first_ones_checkpoints(check, refused, tmp_path):
    assert check(job(None, job="math")) and check(job(None, job="math"))  # its own it goes on from
    assert "holds the checkpoints of job 'math'" in (line := refused(job(None, job="code")))
    assert "trainer.experiment_name" in line and str(tmp_path / "") not in line  # as it was given


def test_a_folder_that_cannot_be_written_is_refused(refused, tmp_path):
    (tmp_path / "checkpoints").touch()
    assert "trainer.default_local_dir=checkpoints/" in refused(job(None))


@pytest.mark.parametrize(
    ("mode", "nodes", "note", "save_freq", "in_background", "movable"),
    [
        ("mux_separate", "auto", "note", 5, False, True),
        ("mux_separate", "auto", None, 5, False, False),  # no launcher starts it again
        ("mux_separate", "auto", "note", -1, False, False),  # it keeps no checkpoints
        ("mux_separate", "auto", "note", 5, True, False),  # they are not whole when it ends
        ("mux_separate", NODES, "note", 5, False, True),
        ("mux_colocate", "auto", "note", 5, False, True),
    ],
)
def test_a_job_says_whether_it_may_be_moved_and_is_colocated(monkeypatch, mode, nodes, note, save_freq, in_background, movable):
    noted = {}
    for name in ("needs_of", "host_memory_of"):
        monkeypatch.setattr(preflight, name, lambda config: None)
    monkeypatch.setattr(preflight, "connect", lambda *_, **keys: noted.update(keys) or LocalMux("a", NODES))
    config = job("tcp://127.0.0.1:1", nodes=nodes, move_note=note)
    config.trainer.v1.trainer_mode, config.trainer.nnodes, config.trainer.save_freq = mode, 1, save_freq
    OmegaConf.update(config, "actor_rollout_ref.actor.checkpoint.async_save", in_background, force_add=True)
    preflight.connect_job(config, load(config))
    assert (noted["movable"], noted["colocated"]) == (movable, mode == "mux_colocate")


@pytest.mark.parametrize(("given", "used"), [(None, "CPU"), ("ssd", "ssd")])
def test_samples_are_stored_on_nodes_with_cpus_and_not_on_a_head_without(check, coordinator, given, used):
    key = "transfer_queue.backend.SimpleStorage.required_node_resource"
    OmegaConf.update(config := job(coordinator.address), key, given, force_add=True)
    assert check(config) and OmegaConf.select(config, key) == used


def test_a_job_that_starts_has_not_left_to_move(check, coordinator, tmp_path):
    note = tmp_path / "left_to_move"
    note.touch()
    assert check(job(coordinator.address, move_note=str(note)))
    assert not note.exists()


# ---------------------------------------------------------------- what a job says of itself


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


def test_a_colocated_job_needs_the_trainers_nodes_for_its_rollouts_too(model):
    config = whole_config(model)
    config.trainer.v1.trainer_mode, config.actor_rollout_ref.rollout.nnodes = "mux_colocate", 0
    needs = needs_of(config)
    assert (needs.rollout_nodes, needs.rollout_gpus) == (needs.train_nodes, needs.train_gpus)


def test_a_job_reports_what_a_step_computes_and_overrides_of_the_model_config_count(model):
    config = OmegaConf.merge(whole_config(model), {"actor_rollout_ref": {"model": {"override_config": {"num_hidden_layers": 9}}}})
    needs = needs_of(config)
    assert (needs.responses, needs.prompt_tokens, needs.response_tokens) == (64, 32, 32)
    assert (needs.rollout_gpus, needs.train_gpus, needs.replica_gpus, needs.updates, needs.weight_bytes) == (8, 8, 2, 2, 4)
    assert (needs.model.hidden_size, needs.model.num_hidden_layers) == (64, 9)


def test_a_model_without_a_config_is_refused_by_its_path(tmp_path):
    assert f"actor_rollout_ref.model.path={tmp_path}" in refusal(whole_config(tmp_path), needs_of)


def test_a_job_reports_what_its_states_take_on_each_node_of_a_side(model):
    config = OmegaConf.merge(whole_config(model), {"actor_rollout_ref": {"rollout": {"nnodes": 1}}})
    noted = host_memory_of(config)
    job, nodes = read_job(OmegaConf.to_container(config, resolve=True), MODEL), config.trainer.nnodes
    assert [noted["train"][kind] * nodes for kind in ("optimizer", "parameters")] == [8 * job.model.total, 4 * job.model.total]
    assert noted["rollout"]["synced"] == job.model.total * job.engine.bytes


def test_of_a_model_that_the_formulas_do_not_know_nothing_is_reported(model):
    config = whole_config(model)
    (model / "config.json").write_text(json.dumps({**MODEL, "kv_lora_rank": 512}))
    assert host_memory_of(config) == {}
    config.actor_rollout_ref.model.path = str(model / "nowhere")
    assert host_memory_of(config) == {}


# ---------------------------------------------------------------- its Ray cluster


def test_fewer_cpus_than_a_job_waits_for_are_refused_with_what_wants_them(refused, check, coordinator, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    config = job(coordinator.address)
    config.transfer_queue = {"backend": {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": 8}}}
    config.ray_kwargs = {"ray_init": {"num_cpus": 49}}
    text = refused(config)
    assert "the job's own Ray has 49 CPUs and this job needs 50, or waits for ever: 8 for TransferQueue's storage units" in text
    assert "24 for training workers, 16 for rollout workers" in text
    config.ray_kwargs.ray_init.num_cpus = 50
    assert check(config)


def test_in_a_cluster_that_runs_workers_get_the_jobs_mark_and_too_few_cpus_are_refused(refused, check, coordinator, monkeypatch):
    import ray

    left, freed = [4.0], []
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(preflight, "_FREED_S", 0.0)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # in this process, by a test before it
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "shutdown", lambda: freed.append(1))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 64})
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": left[0]})
    config = job(coordinator.address)
    config.transfer_queue = {"backend": {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": 8}}}
    text = refused(config)
    assert "other jobs leave, of the Ray cluster at 10.0.0.1:6379, 4 CPUs and this job needs 50" in text
    left[0] = 50.0
    assert check(config) and len(freed) == 2
    assert config.ray_kwargs.ray_init.runtime_env.env_vars == {UID_VARIABLE: os.environ[UID_VARIABLE]}


@pytest.mark.parametrize(("name", "again"), [(None, True), ("", False), ("a socket", False)])
def test_a_driver_becomes_a_fork_server_once_and_not_where_forks_are_not_possible(monkeypatch, name, again):
    def refuse(*_):
        raise UserError("the next check")

    started: list[str] = []
    mux = SimpleNamespace(launch=SimpleNamespace(warm=True))
    monkeypatch.setattr(preflight, "check", lambda _: mux)
    monkeypatch.setattr(preflight, "refused_surroundings", lambda *_: ())
    monkeypatch.setattr(preflight, "model_config", lambda _: None)
    monkeypatch.setattr(preflight, "ask_coordinator", refuse)
    monkeypatch.setattr(preflight.os, "execv", lambda _, words: started.extend(words))
    monkeypatch.setattr("sys.argv", ["main_ppo", "ray_kwargs.ray_init.address=local"])
    monkeypatch.delenv(VARIABLE, raising=False)
    if name is not None:
        monkeypatch.setenv(VARIABLE, name)
    with pytest.raises(SystemExit):
        preflight.check_job(OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": preflight.installed()[0].name}}}))
    assert ("verl_mux.warm.fork_server" in started) == again
