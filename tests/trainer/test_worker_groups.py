"""What a trainer asks of Ray for its nodes, and what it finds there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")
from verl_mux.coordinator.bus.client import LocalMux
from verl_mux.errors import UserError
from verl_mux.places.place import Place
from verl_mux.places.ray_nodes import PlacedPool, RayNode
from verl_mux.trainer import worker_groups
from verl_mux.trainer.worker_groups import checkpoint_to_resume, placed_pools, settle_nodes
from verl_mux.worker_settings import WorkerSettings

PLACES = {name: Place(host=name) for name in ("r0", "t0", "t1")}


@pytest.fixture
def ray_has(monkeypatch):
    """The Ray cluster offers these GPUs by mux node, on hosts with these addresses."""

    def given(**nodes: tuple[str, int]) -> None:
        found = [RayNode(address, gpus, {f"mux_{name}": 1}) for name, (address, gpus) in nodes.items()]
        monkeypatch.setattr(worker_groups, "ray_nodes", lambda: found)

    return given


def client(rollout: list[str], train: list[str]) -> SimpleNamespace:
    return SimpleNamespace(address="tcp://h:1", nodes={"rollout": rollout, "train": train}, place=PLACES.__getitem__)


CONFIG = OmegaConf.create({"trainer": {"n_gpus_per_node": 4}, "actor_rollout_ref": {"rollout": {"n_gpus_per_node": 2}}})


def test_nodes_come_in_the_order_in_which_verl_will_count_their_ranks(ray_has):
    ray_has(r0=("10.0.0.5", 2), t0=("10.0.0.9", 4), t1=("10.0.0.10", 4))
    nodes = settle_nodes(client(["r0"], ["t0", "t1"]), CONFIG, colocated=False)
    assert (nodes.rollout, nodes.train, nodes.places) == (["r0"], ["t1", "t0"], PLACES)


def test_both_pools_of_a_job_on_one_node_need_its_gpus_together(ray_has):
    ray_has(t0=("10.0.0.9", 5))
    with pytest.raises(UserError, match="asks for 6 GPUs there, but its Ray node 10.0.0.9 offers 5"):
        settle_nodes(client(["t0"], ["t0"]), CONFIG, colocated=False)
    assert settle_nodes(client(["t0"], ["t0"]), CONFIG, colocated=True).train == ["t0"]


def test_without_a_coordinator_nobody_asks_ray(monkeypatch):
    monkeypatch.setattr(worker_groups, "ray_nodes", lambda: pytest.fail("asked"))
    alone = settle_nodes(LocalMux("a", {"rollout": ["rollout0"], "train": ["train0"]}), CONFIG, colocated=False)
    assert (alone.rollout, alone.train, alone.places) == (["rollout0"], ["train0"], {})


def test_pools_are_placed_where_the_training_nodes_have_hosts():
    manager = worker_groups.ResourcePoolManager({"global_pool": [4, 4]}, {"actor": "global_pool"})
    settings = WorkerSettings(train_nodes=("t0", "t1"))
    assert placed_pools(manager, settings) is manager
    placed = placed_pools(manager, WorkerSettings(train_nodes=("t0", "t1"), places=PLACES))
    placed._check_resource_available = lambda: None
    placed.create_resource_pool()
    pool = placed.get_resource_pool("actor")
    assert isinstance(pool, PlacedPool) and pool.store == [4, 4] and pool.max_colocate_count == manager.max_colocate_count


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({"resume_mode": "auto"}, "checkpoints/global_step_7"),
        ({"resume_mode": "auto", "default_local_dir": "elsewhere"}, None),
        ({"resume_mode": "disable"}, None),
        ({"resume_mode": "resume_path", "resume_from_path": "old/global_step_3"}, "old/global_step_3"),
    ],
)
def test_the_checkpoint_is_the_one_that_verl_will_load(tmp_path, monkeypatch, trainer, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints" / "global_step_7").mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("7")
    config = OmegaConf.create({"trainer": {"default_local_dir": "checkpoints", **trainer}})
    assert checkpoint_to_resume(config) == (expected and str(tmp_path / expected))
