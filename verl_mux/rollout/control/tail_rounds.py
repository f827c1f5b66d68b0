"""Tail batching without staleness: prompts whose responses are likely to be long are gathered, whole, into rounds of their own.

    gather a window of prompts -> plan its rounds -> a round a step, each run to its end on one version of the weights

A step lasts as long as its longest response, so long responses are dear where they are spread over all steps and cheap where
they share some. Which prompts are long is told from earlier epochs and from a predictor, before a token of them is drawn: no
draw is thrown away, so no length is selected, and each prompt of a window is trained once.

The rounds of a window, longest prompts first: the longest that is left and, for each further place, the longest beside which
the shortest still fit into the rest. They are run spread over the window, so that long and short steps alternate. In a first
epoch what is left is planned anew when a part of the window has been trained, with what that taught.
Invariants (asserted by the tests): each prompt is handed out once. No round is expected to have a mean beyond the bound, unless
its longest prompt is too long for it even beside the shortest; with a bound of twice the window's mean or more such a prompt is
longer than (batch + 1) means. What a round turns out to be is only known when it has been drawn: most doubt about it is left
room for, and `Mix` tells it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import sqrt
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from verl_mux.rollout.control.length_estimates import Expected
from verl_mux.rollout.lengths.rows import Prompt

TAILS = ("none", "defer")
# Standard deviations that are left between a round's expected mean and the bound: lengths are skewed, and no more than one round
# in some hundreds is to turn out beyond it.
_MARGIN = 2.5
_REPLANS = 8  # a window


class DeferPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `mux.rollout.defer`. window: steps whose prompts are gathered together; null: a whole epoch.

    max_mean: most that a round's mean length may be expected to be, as a multiple of its window's. A round's own mean is only
    known when it has been drawn.
    """

    window: int | None = None
    max_mean: float = 2.0


class Estimates(Protocol):
    """What is known of lengths: LengthEstimates, or an oracle."""

    def observe(self, prompt: Prompt, epoch: int, lengths: Sequence[int]) -> None: ...
    def expect(self, prompts: Sequence[Prompt]) -> Expected: ...
    def knows(self, prompt: Prompt) -> bool: ...


class Mix(NamedTuple):
    """What the latest step's mean length was, over its window's. measured: its responses'. expected: before they were drawn.

    above: steps of the window so far whose measured mean was beyond the bound.
    """

    measured: float
    expected: float
    above: int


class _Group(NamedTuple):
    """A prompt group to plan: its index, and what is expected of its mean length, in tokens and tokens squared."""

    at: int
    mean: float
    variance: float


def plan(expected: Expected, batch: int, most: float) -> list[list[int]]:
    """Rounds of `batch` prompts, by index, in the order in which to run them; the last may have fewer.

    most: that a round's mean length may be expected to be, in tokens. Where nothing is known of any prompt, rounds are
    the prompts in their order.
    """
    total = len(expected.mean)
    if total == 0 or np.ptp(expected.order_by) == 0:
        return [list(range(at, min(at + batch, total))) for at in range(0, total, batch)]
    order = np.argsort(-expected.order_by, kind="stable")
    left = [_Group(at, float(expected.mean[at]), float(expected.variance[at])) for at in order.tolist()]
    tokens = sum(group.mean for group in left)
    rounds = []
    while len(left) >= batch:
        fair = batch * tokens / len(left) * (1 - 1e-9)
        for margin in (_MARGIN, 0.0):
            places = _round(left, batch, most, margin)
            taken = sum(left[place].mean for place in places)
            if taken >= fair:  # else what is left would get longer on average, in the end beyond the bound
                break
        rounds.append([left[place] for place in places])
        tokens -= taken
        for place in reversed(places):
            del left[place]
    return [sorted(group.at for group in its) for its in [*_spread(rounds), *([left] if left else [])]]


def _round(left: Sequence[_Group], batch: int, most: float, margin: float) -> list[int]:
    """Places of one round in `left`, which has the longest first. margin: standard deviations below `most`."""
    shortest = left[:-batch:-1]  # which the places after the one at hand will get at least
    rest_mean = [0.0, *accumulate(group.mean for group in shortest)]
    rest_variance = [0.0, *accumulate(group.variance for group in shortest)]
    places, mean, variance = [0], left[0].mean, left[0].variance  # sums of those chosen
    for missing in range(batch - 2, -1, -1):
        open_to = range(places[-1] + 1, len(left) - missing)
        room = batch * most * (1 + 1e-9) - mean - rest_mean[missing]
        place = _longest_that_fits(left, open_to, room, variance + rest_variance[missing], margin)
        places.append(place)
        mean, variance = mean + left[place].mean, variance + left[place].variance
    return places


def _longest_that_fits(left: Sequence[_Group], places: range, room: float, variance: float, margin: float) -> int:
    """Of these places the first whose group fits, else the last. room: tokens. variance: of the round's other groups."""
    fits = bisect_left(places, True, key=lambda at: left[at].mean + margin * sqrt(variance + left[at].variance) <= room)
    return places[min(fits, len(places) - 1)]


def _spread(rounds: list[list[_Group]]) -> list[list[_Group]]:
    """Long rounds among short ones: by the bits of their rank, reversed, so that every stretch has some of each."""
    bits = max(1, (len(rounds) - 1).bit_length())
    turn = sorted(range(len(rounds)), key=lambda at: int(f"{at:0{bits}b}"[::-1], 2))
    return [rounds[at] for at in turn]


class TailRounds:
    """gather -> (take -> trained)* -> gather of the next window. Names are the prompt groups', unique for each draw.

    batch: prompt groups of a step.
    """

    def __init__(self, policy: DeferPolicy, batch: int, estimates: Estimates) -> None:
        self.policy, self._batch, self._estimates = policy, batch, estimates
        self._prompts: dict[str, Prompt] = {}  # gathered and not trained
        self._rounds: list[list[str]] = []
        self._new = self._window = 0  # groups trained since the last plan; gathered at the last gathering
        self._means: list[float] = []  # of this window's groups that have been trained
        self._steps: list[float] = []  # and of its steps
        self._expected: dict[str, float] = {}  # tokens, of groups that were told apart; at the last plan
        self._bound = 0.0  # tokens, at the last plan
        self.mix = Mix(1.0, 1.0, 0)

    @property
    def left(self) -> int:
        """Prompt groups gathered and not handed out."""
        return sum(map(len, self._rounds))

    def gather(self, names: Sequence[str], prompts: Sequence[Prompt]) -> None:
        """A window's prompts join what is left of the last one."""
        self._prompts |= dict(zip(names, prompts, strict=True))
        self._rounds.append(list(names))
        self._window, self._means, self._steps = len(names), [], []
        self._plan()

    def take(self, count: int) -> list[str]:
        """The next round. Where fewer are asked for (a lost group is replaced, a window begins within a step) the shortest,
        beside which any others stay within the bound; the rest gets new rounds."""
        if self._new * _REPLANS >= self._window and not all(self._estimates.knows(self._prompts[name]) for name in self._names()):
            self._plan()
        taken: list[str] = []
        while self._rounds and len(self._rounds[0]) <= count - len(taken):
            taken += self._rounds.pop(0)
        if self._rounds and len(taken) < count:
            names = sorted(self._names(), key=lambda name: self._expected.get(name, 0.0))
            taken, self._rounds = taken + names[: count - len(taken)], [names[count - len(taken) :]]
            self._plan()
        return taken

    def trained(self, step: Mapping[str, Sequence[int]], epoch: int) -> None:
        """A step was trained: response lengths of its prompt groups. Of those that were given up there are none, and nothing is
        learnt."""
        known = {name: lengths for name, lengths in step.items() if lengths and name in self._prompts}
        bound, expected = self._bound, [self._expected[name] for name in known if name in self._expected]
        for name, lengths in known.items():
            self._estimates.observe(self._prompts[name], epoch, lengths)
            self._means.append(float(np.mean(lengths)))
        for name in step:
            self._prompts.pop(name, None)
        self._new += len(known)
        if known:
            self._steps.append(float(np.mean([length for lengths in known.values() for length in lengths])))
            window = self._window_mean([self._expected[name] for name in self._names() if name in self._expected])
            most = self.policy.max_mean
            told = most * float(np.mean(expected)) / bound if expected else 1.0
            self.mix = Mix(self._steps[-1] / window, told, sum(mean > most * window for mean in self._steps))

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint: the rounds as they are planned, and what the window was so far."""
        return {
            "rounds": self._rounds, "window": self._window, "means": self._means, "steps": self._steps,
            "expected": self._expected, "bound": self._bound,
        }  # fmt: skip

    def restore(self, saved: dict[str, Any], prompts: dict[str, Prompt]) -> None:
        """Resume. prompts: of the names in the rounds. Earlier versions saved neither `means` nor what follows it."""
        self._rounds, self._window = [list(its) for its in saved["rounds"]], saved["window"]
        self._prompts, self._means, self._steps = dict(prompts), list(saved.get("means", [])), list(saved.get("steps", []))
        self._expected, self._bound = dict(saved.get("expected", {})), saved.get("bound", 0.0)

    def _names(self) -> list[str]:
        return [name for its in self._rounds for name in its]

    def _window_mean(self, left: Sequence[float]) -> float:
        """Of the whole window, in tokens: what has been trained was longer or shorter than what is left."""
        return max(float(np.mean([*self._means, *left])), 1e-9)

    def _plan(self) -> None:
        self._new, names = 0, self._names()
        if not names:
            return
        expected = self._estimates.expect([self._prompts[name] for name in names])
        under_way = self._prompts.keys() - set(names)
        self._expected = {name: tokens for name, tokens in self._expected.items() if name in under_way}
        self._bound = self.policy.max_mean * self._window_mean([*self._expected.values(), *expected.mean.tolist()])
        if np.ptp(expected.order_by) > 0:
            self._expected |= dict(zip(names, expected.mean.tolist(), strict=True))
        self._rounds = [[names[at] for at in its] for its in plan(expected, self._batch, self._bound)]
