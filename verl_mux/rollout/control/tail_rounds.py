"""Tail batching without staleness: prompts whose responses are likely to be long are gathered, whole, into rounds of their own.

    gather a window of prompts -> plan its rounds -> a round a step, each run to its end on one version of the weights

A step lasts as long as its longest response, so long responses are dear where they are spread over all steps and cheap where
they share some. Which prompts are long is told from earlier epochs and from a predictor, before a token of them is drawn: no
draw is thrown away, so no length is selected, and each prompt of a window is trained once.

The rounds of a window, longest prompts first: as many of the longest as the bound on a round's mean length allows, filled up
with the shortest. They are run spread over the window, so that long and short steps alternate. In a first epoch what is left is
planned anew when a part of the window has been trained, with what that taught.
Invariants (asserted by the tests): each prompt is handed out once; no round is expected to have a mean beyond the bound unless
one prompt alone does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from verl_mux.rollout.control.length_estimates import Expected
from verl_mux.rollout.lengths.rows import Prompt

TAILS = ("none", "defer")
# Standard deviations that are left between a round's expected mean and the bound.
_MARGIN = 1.0
_REPLANS = 8  # a window


class DeferPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `mux.rollout.defer`. window: steps whose prompts are gathered together; null: a whole epoch.

    max_mean: most that a round's mean length may be expected to be, as a multiple of its window's.
    """

    window: int | None = None
    max_mean: float = 2.0


class Estimates(Protocol):
    """What is known of lengths: LengthEstimates, or an oracle."""

    def observe(self, prompt: Prompt, epoch: int, lengths: Sequence[int]) -> None: ...
    def expect(self, prompts: Sequence[Prompt]) -> Expected: ...
    def knows(self, prompt: Prompt) -> bool: ...


def plan(expected: Expected, batch: int, most: float) -> list[list[int]]:
    """Rounds of `batch` prompts, by index, in the order in which to run them; the last may have fewer.

    most: that a round's mean length may be expected to be, in tokens. Where nothing is known of any prompt, rounds are
    the prompts in their order.
    """
    total = len(expected.mean)
    if total == 0 or np.ptp(expected.order_by) == 0:
        return [list(range(at, min(at + batch, total))) for at in range(0, total, batch)]
    left = np.argsort(-expected.order_by, kind="stable").tolist()
    rest = left[total // batch * batch :]  # the shortest are the round that is not full
    left = left[: total - len(rest)]
    rounds = []
    while left:
        longest = _longest_that_fit(left, expected, batch, most)
        shortest = len(left) - (batch - longest)
        rounds.append(left[:longest] + left[shortest:])
        left = left[longest:shortest]
    return [sorted(its) for its in [*_spread(rounds), *([rest] if rest else [])]]


def _longest_that_fit(left: Sequence[int], expected: Expected, batch: int, most: float) -> int:
    """How many of the longest go into one round with the shortest; at least one. left: longest first."""
    for longest in range(batch, 1, -1):
        its = [*left[:longest], *left[len(left) - (batch - longest) :]]
        spread = float(np.sqrt(expected.variance[its].sum())) / batch
        if float(expected.mean[its].mean()) + _MARGIN * spread <= most:
            return longest
    return 1


def _spread(rounds: list[list[int]]) -> list[list[int]]:
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

    @property
    def left(self) -> int:
        """Prompt groups gathered and not handed out."""
        return sum(map(len, self._rounds))

    def gather(self, names: Sequence[str], prompts: Sequence[Prompt]) -> None:
        """A window's prompts join what is left of the last one."""
        self._prompts |= dict(zip(names, prompts, strict=True))
        self._rounds.append(list(names))
        self._window, self._means = len(names), []
        self._plan()

    def take(self, count: int) -> list[str]:
        """The next round; where another number than a round's is asked for (a lost group is replaced), as many of the next."""
        if self._new * _REPLANS >= self._window and not all(self._estimates.knows(self._prompts[name]) for name in self._names()):
            self._plan()
        taken: list[str] = []
        while self._rounds and len(taken) < count:
            its = self._rounds[0]
            missing = count - len(taken)
            taken += its[:missing]
            self._rounds = [its[missing:], *self._rounds[1:]] if len(its) > missing else self._rounds[1:]
        return taken

    def trained(self, name: str, epoch: int, lengths: Sequence[int]) -> None:
        """A prompt group was trained, or given up: then without lengths, and nothing is learnt."""
        prompt = self._prompts.pop(name, None)
        if prompt is not None and lengths:
            self._estimates.observe(prompt, epoch, lengths)
            self._means.append(float(np.mean(lengths)))
            self._new += 1

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint: the rounds as they are planned."""
        return {"rounds": self._rounds, "window": self._window, "means": self._means}

    def restore(self, saved: dict[str, Any], prompts: dict[str, Prompt]) -> None:
        """Resume. prompts: of the names in the rounds."""
        self._rounds, self._window = [list(its) for its in saved["rounds"]], saved["window"]
        self._prompts, self._means = dict(prompts), list(saved["means"])

    def _names(self) -> list[str]:
        return [name for its in self._rounds for name in its]

    def _plan(self) -> None:
        self._new, names = 0, self._names()
        if not names:
            return
        expected = self._estimates.expect([self._prompts[name] for name in names])
        # Of the whole window: what has been trained was longer or shorter than what is left.
        whole = float(np.mean([*self._means, *expected.mean]))
        self._rounds = [[names[at] for at in its] for its in plan(expected, self._batch, self.policy.max_mean * whole)]
