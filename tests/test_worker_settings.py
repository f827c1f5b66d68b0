import os
from types import SimpleNamespace

import msgspec
import pytest
from omegaconf import OmegaConf

from verl_mux.places.place import Place
from verl_mux.worker_settings import KEY, WorkerSettings, node_of, open_worker_log

PLACES = {"r0": Place(host="gpu-07", gpu_ids=[0, 1]), "r1": Place(), "t0": Place(cpus=[1])}
SETTINGS = WorkerSettings(
    job="math", uid="ab12", seed=3, events_dir="/logs", rollout_nodes=("r0", "r1"), train_nodes=("t0",), train_cpus=(1,),
    places=PLACES,
)  # fmt: skip


@pytest.mark.parametrize("kind", ["mapping", "config", "dataclass"])
def test_workers_read_back_what_the_driver_put_into_verls_config(kind):
    custom = {KEY: SETTINGS.to_dict(), "of": "another plugin"}
    kinds = {"mapping": dict, "config": lambda **it: OmegaConf.create(it), "dataclass": SimpleNamespace}
    assert WorkerSettings.from_rollout_config(kinds[kind](custom=custom)) == SETTINGS


@pytest.mark.parametrize("rollout", [{}, {"custom": None}, {"custom": {}}, OmegaConf.create({"custom": None}), SimpleNamespace()])
def test_without_them_there_are_defaults(rollout):
    assert WorkerSettings.from_rollout_config(rollout) == WorkerSettings()


def test_they_survive_a_config_file():
    text = OmegaConf.to_yaml(OmegaConf.create({"custom": {KEY: SETTINGS.to_dict()}}))
    assert WorkerSettings.from_rollout_config(OmegaConf.create(text)) == SETTINGS


@pytest.mark.parametrize(("nodes", "expected"), [("a", "aaa"), ("ab", "ab"), ("ab", "aabb"), ("abcd", "abcd")])
def test_places_fill_the_nodes_in_order(nodes, expected):
    assert [node_of(nodes, place, len(expected)) for place in range(len(expected))] == list(expected)


def test_a_side_is_bound_where_its_nodes_have_hosts():
    assert (SETTINGS.is_bound("rollout"), SETTINGS.is_bound("train"), WorkerSettings().is_bound("train")) == (True, False, False)


def test_servers_of_other_runs_replicas_and_nodes_meet_elsewhere():
    other_run = msgspec.structs.replace(SETTINGS, uid="cd34")
    places = {s.server_directory(replica, node) for s in (SETTINGS, other_run) for replica in (0, 1) for node in (0, 1)}
    assert len(places) == 8


def test_a_process_is_kept_on_its_nodes_cpus(python):
    cpu = min(os.sched_getaffinity(0))
    code = f"""
import os
from verl_mux.worker_settings import pin
pin(({cpu},))
print(os.sched_getaffinity(0), os.environ["OMP_NUM_THREADS"])
pin(())  # no CPUs: it stays
print(os.sched_getaffinity(0))
"""
    assert python("-c", code).stdout == f"{{{cpu}}} 1\n{{{cpu}}}\n"


def test_without_a_directory_nothing_is_logged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = open_worker_log(WorkerSettings(), "rollout", 0)
    log.log("sync", 1.0)
    assert not log.enabled and not list(tmp_path.iterdir())


def test_a_workers_log_is_named_after_its_role_and_number(tmp_path):
    log = open_worker_log(msgspec.structs.replace(SETTINGS, events_dir=str(tmp_path)), "server", 4)
    log.log("sleep", 1.0, step=2)
    log.close()
    assert [p.name for p in (tmp_path / "server" / "step_2").iterdir()] == ["worker_4.jsonl"]
