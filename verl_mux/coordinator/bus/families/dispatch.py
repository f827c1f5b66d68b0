"""The learner, to whoever decides when it trains. Prompts, samples and rewards travel by Ray: docs/rollout.md."""

from __future__ import annotations

from verl_mux.coordinator.bus.families.base import Message


class LearnerStateUpdate(Message, kw_only=True, frozen=True, tag="LEARNER_STATE_UPDATE"):
    """Mean policy entropy in nats of the weights `policy_version`."""

    entropy: float
    policy_version: int
