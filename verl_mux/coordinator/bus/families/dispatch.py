"""Rollout dispatch: an agent loop worker, its scheduler, and the learner whose state they follow."""

from __future__ import annotations

from typing import Any

from verl_mux.coordinator.bus.families.base import Message


class TaskRequest(Message, kw_only=True, frozen=True, tag="TASK_REQUEST"):
    """An idle rollout worker asks its scheduler for work."""

    worker_id: str


class NewTask(Message, kw_only=True, frozen=True, tag="NEW_TASK"):
    worker_id: str
    prompt: str | list[int]
    request_id: str = ""
    sampling: dict[str, Any] = {}


class DataGenerated(Message, kw_only=True, frozen=True, tag="DATA_GENERATED"):
    """`num_tokens` response tokens of the sample in buffer slot `slot_id`, made with weights `policy_version`."""

    slot_id: int
    policy_version: int | None = None
    num_tokens: int | None = None


class RewardComputed(Message, kw_only=True, frozen=True, tag="REWARD_COMPUTED"):
    slot_id: int
    reward: float | None = None


class LearnerStateUpdate(Message, kw_only=True, frozen=True, tag="LEARNER_STATE_UPDATE"):
    """Mean policy entropy in nats of the weights `policy_version`."""

    entropy: float
    policy_version: int


class Migrate(Message, kw_only=True, frozen=True, tag="MIGRATE"):
    """Move the named requests, or all when empty, from one rollout worker to another."""

    source: str
    target: str
    request_ids: list[str] = []
