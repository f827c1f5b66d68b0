"""When a streaming trainer trains: enough prompt groups are ready, or it has waited long enough for at least one.

    train when ready >= n_min, or when the trainer has waited for t_max_s and ready >= 1

The wait begins when the trainer asks for samples: what it spends on training is no wait.

With entropy feedback (off by default: nobody has shown that it helps) the trainer's mean entropy moves both thresholds:

    EXPLORING (entropy high: half of both) <-> STEADY (as configured) <-> CONVERGED (entropy low: twice both)

A mood is entered at its threshold and left only `margin` beyond it, so entropy that hovers there changes nothing. Events
carry `now` in seconds of any one clock; nothing here reads a clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import msgspec

from verl_mux.coordinator.bus.messages import LearnerStateUpdate


class Mood(Enum):
    """What the entropy says of the policy, with the factor on n_min and t_max."""

    EXPLORING = 0.5
    STEADY = 1.0
    CONVERGED = 2.0


class EntropyFeedback(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `mux.rollout.trigger.entropy`. high, low, margin: in nats.

    n_min (prompt groups) and t_max_s (seconds) stay within their bounds, the lowest and the highest, whatever the mood.
    """

    enable: bool = False
    high: float = 1.0
    low: float = 0.2
    margin: float = 0.1
    n_min_bounds: tuple[int, int] = (1, 1024)
    t_max_s_bounds: tuple[float, float] = (0.1, 3600.0)


class TriggerPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `mux.rollout.trigger`. n_min: prompt groups. t_max_s: seconds."""

    enable: bool = False
    n_min: int = 32
    t_max_s: float = 60.0
    entropy: EntropyFeedback = EntropyFeedback()


@dataclass(frozen=True, slots=True)
class Train:
    """Train now on `groups` prompt groups. reason: enough | waited."""

    groups: int
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again at `until`, if nothing happens before; None: only an event can change the answer."""

    until: float | None


class TrainingTrigger:
    """waits when the trainer asks for samples; then ready and learner_state whenever they change, and decide after each and at
    Wait.until, until it says Train."""

    def __init__(self, policy: TriggerPolicy) -> None:
        self.policy = policy
        self.mood = Mood.STEADY
        self._ready = 0
        self._since: float | None = None  # None: the trainer trains
        self._version = -1

    def waits(self, now: float) -> None:
        """The trainer has nothing to do but wait for samples, from now on."""
        self._since = now if self._since is None else self._since

    def ready(self, groups: int) -> None:
        """So many prompt groups are ready now."""
        self._ready = groups

    def learner_state(self, news: LearnerStateUpdate) -> None:
        """What the trainer says of its policy. Late news of an older version is ignored."""
        if not self.policy.entropy.enable or news.policy_version <= self._version or math.isnan(news.entropy):
            return
        self._version = news.policy_version
        self.mood = _mood(self.mood, news.entropy, self.policy.entropy)

    def decide(self, now: float) -> Train | Wait:
        """Train, which ends the trainer's wait, or wait."""
        self.waits(now)
        assert self._since is not None
        deadline = self._since + self.t_max_s
        if self._ready >= self.n_min:
            return self._train("enough")
        if self._ready and now >= deadline:
            return self._train("waited")
        return Wait(deadline if self._ready else None)

    @property
    def n_min(self) -> int:
        """Prompt groups that are enough, in the present mood."""
        feedback = self.policy.entropy
        if not feedback.enable:
            return self.policy.n_min
        low, high = feedback.n_min_bounds
        return max(low, min(high, round(self.policy.n_min * self.mood.value)))

    @property
    def t_max_s(self) -> float:
        """Longest wait in seconds, in the present mood."""
        feedback = self.policy.entropy
        if not feedback.enable:
            return self.policy.t_max_s
        low, high = feedback.t_max_s_bounds
        return max(low, min(high, self.policy.t_max_s * self.mood.value))

    def _train(self, reason: str) -> Train:
        groups, self._ready, self._since = self._ready, 0, None
        return Train(groups, reason)


def _mood(mood: Mood, entropy: float, feedback: EntropyFeedback) -> Mood:
    if entropy >= feedback.high:
        return Mood.EXPLORING
    if entropy <= feedback.low:
        return Mood.CONVERGED
    if mood is Mood.EXPLORING and entropy > feedback.high - feedback.margin:
        return mood
    if mood is Mood.CONVERGED and entropy < feedback.low + feedback.margin:
        return mood
    return Mood.STEADY
