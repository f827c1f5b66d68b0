"""A trainer's worker groups: on the job's nodes, and looked at before they touch a device."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from omegaconf import DictConfig
from verl.single_controller.ray.base import ResourcePoolManager
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path, get_checkpoint_tracker_filename

from verl_mux.coordinator.bus.client import LocalMux
from verl_mux.places.place import Location, Place, check
from verl_mux.places.ray_nodes import PlacedPool, check_cluster, in_rank_order, ray_nodes
from verl_mux.worker_settings import WorkerSettings, node_of


@dataclass(frozen=True)
class Nodes:
    """A job's, by side in the order of ranks; and where each of them is."""

    rollout: list[str]
    train: list[str]
    places: Mapping[str, Place]


def settle_nodes(client: LocalMux, config: DictConfig, colocated: bool) -> Nodes:
    """The coordinator's answer: pools spelt out, where it placed a job that left its nodes to it; and what Ray makes of that.
    Without a coordinator nobody else is there, and nodes are names.

    Raises:
        UserError: Ray cannot put the job on its nodes, or nobody could tell whether it did.
    """
    rollout, train = list(client.nodes["rollout"]), list(client.nodes["train"])
    if client.address is None:
        return Nodes(rollout, train, {})
    places, cluster = {node: client.place(node) for node in (*rollout, *train)}, ray_nodes()
    asked = dict.fromkeys(train, int(config.trainer.n_gpus_per_node))
    for node in [] if colocated else rollout:
        asked[node] = asked.get(node, 0) + int(config.actor_rollout_ref.rollout.n_gpus_per_node)
    check_cluster(places, asked, cluster)
    return Nodes(in_rank_order(rollout, places, cluster), in_rank_order(train, places, cluster), places)


def checkpoint_to_resume(config: DictConfig) -> str | None:
    """The folder from which verl will go on, as it finds it."""
    trainer = config.trainer
    if trainer.resume_mode == "resume_path":
        return os.path.abspath(trainer.resume_from_path)
    folder = os.path.abspath(trainer.default_local_dir)
    if trainer.resume_mode != "auto" or not os.path.exists(get_checkpoint_tracker_filename(folder)):
        return None
    return find_latest_ckpt_path(folder)


@dataclass
class PlacedPools(ResourcePoolManager):
    """verl's pools of a trainer, each on the training nodes."""

    nodes: Sequence[str] = ()

    def create_resource_pool(self) -> None:
        super().create_resource_pool()
        for name, gpus in self.resource_pool_spec.items():
            self.resource_pool_dict[name] = PlacedPool(self.nodes, gpus[0], self.max_colocate_count, name)


def placed_pools(manager: ResourcePoolManager, settings: WorkerSettings) -> ResourcePoolManager:
    """verl's manager, or where the training nodes have hosts, one that puts its pools there."""
    if not settings.is_bound("train"):
        return manager
    return PlacedPools(manager.resource_pool_spec, manager.mapping, nodes=settings.train_nodes)


def check_ranks(ranks: Sequence[Location], settings: WorkerSettings) -> None:
    """Where the ranks of a training group run, before they touch a device.

    Raises:
        UserError: naming each that runs elsewhere than on its node.
    """
    nodes = settings.train_nodes
    found = [(f"training rank {rank}", node_of(nodes, rank, len(ranks)), at) for rank, at in enumerate(ranks)]
    check(found, settings.places)


class _Trainer(Protocol):
    def before_device(self, group: Any) -> None:
        """This group is about to touch its device."""


class AfterInitLease:
    """A worker group of a trainer that has to take its init lease first.

    verl's `_setup` starts all worker processes, then sets each group right before the group first touches its device (`reset` of
    the critic, `init_model` of the actor). It calls nothing of ours in between, so setting the group is the door.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, trainer: _Trainer, group: Any) -> None:
        trainer.before_device(group)
        vars(trainer)[self._name] = group

    def __get__(self, trainer: _Trainer, owner: type) -> Any:
        if self._name not in vars(trainer):
            raise AttributeError(self._name)
        return vars(trainer)[self._name]
