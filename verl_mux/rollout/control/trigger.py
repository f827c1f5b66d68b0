"""When a streaming trainer trains: enough prompt groups are ready, or it has waited long enough for at least one.

Runs in the trainer's driver; called by trainer/stock_modes.py. Pure: callers pass `now`, in seconds of any one clock.

    train when ready >= n_min, or when the trainer has waited for t_max_s and ready >= 1

The wait begins when the trainer asks for samples: time spent on training is no wait. With entropy feedback (off by default: no
measurement shows that it helps) the trainer's mean entropy moves both thresholds:

    EXPLORING (entropy high: half of both) <-> STEADY (as configured) <-> CONVERGED (entropy low: twice both)

A mood is left only an eighth of the way between low and high beyond the threshold at which it was entered, so entropy that hovers
there changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from verl_mux.coordinator.bus.messages import LearnerStateUpdate

_MARGIN = 0.125  # of the distance between the two thresholds of entropy


class Mood(Enum):
    """What the entropy says of the policy, with the factor on n_min and t_max."""

    EXPLORING = 0.5
    STEADY = 1.0
    CONVERGED = 2.0


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
    Wait.until, until it says Train.

    least: prompt groups that are enough (`n_min`). longest_s: longest wait in seconds (`t_max_s`). entropy: (low, high) in nats;
    None: no feedback.
    """

    def __init__(self, least: int, longest_s: float, entropy: tuple[float, float] | None = None) -> None:
        self._least, self._longest_s, self._entropy = least, longest_s, entropy
        self.mood = Mood.STEADY
        self._ready = 0
        self._since: float | None = None  # None: the trainer trains
        self._version = -1

    def waits(self, now: float) -> None:
        """The trainer has nothing to do but wait for samples, from now on."""
        self._since = now if self._since is None else self._since

    def ready(self, groups: int) -> None:
        """This number of prompt groups is ready now."""
        self._ready = groups

    def learner_state(self, news: LearnerStateUpdate) -> None:
        """The trainer's report of its policy. Late news of an older version is ignored."""
        if self._entropy is None or news.policy_version <= self._version or math.isnan(news.entropy):
            return
        self._version = news.policy_version
        self.mood = _mood(self.mood, news.entropy, *self._entropy)

    def decide(self, now: float) -> Train | Wait:
        """Train, which ends the trainer's wait, or wait."""
        self.waits(now)
        assert self._since is not None
        deadline = self._since + self.t_max_s
        enough = self._ready >= self.n_min
        if not enough and not (self._ready and now >= deadline):
            return Wait(deadline if self._ready else None)
        groups, self._ready, self._since = self._ready, 0, None
        return Train(groups, "enough" if enough else "waited")

    @property
    def n_min(self) -> int:
        """Prompt groups that are enough, in the present mood."""
        return max(1, round(self._least * self.mood.value))

    @property
    def t_max_s(self) -> float:
        """Longest wait in seconds, in the present mood."""
        return self._longest_s * self.mood.value


def _mood(mood: Mood, entropy: float, low: float, high: float) -> Mood:
    margin = _MARGIN * (high - low)
    if entropy >= high:
        return Mood.EXPLORING
    if entropy <= low:
        return Mood.CONVERGED
    if mood is Mood.EXPLORING and entropy > high - margin:
        return mood
    if mood is Mood.CONVERGED and entropy < low + margin:
        return mood
    return Mood.STEADY
