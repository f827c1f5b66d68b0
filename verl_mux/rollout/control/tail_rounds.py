"""Tail rounds (`mux.rollout.tail=defer`): prompts whose responses are likely to be long share rounds of their own.

Runs in the trainer's driver; called by trainer/prompts.py, and by verl_mux/what_if for recorded runs. Pure.

    gather an epoch's prompts -> plan rounds -> a round a step, each run to its end on one version of the weights

A step lasts as long as its longest response, so long responses are dear where they are spread over all steps and cheap where
they share some. Which prompts are long is estimated from earlier epochs and from a predictor, before a token of them is drawn:
no draw is thrown away, so no length is selected, and each prompt of a window is trained once.

A round of a window: the longest prompt that is left and, for each further place, the longest beside which the shortest still fit
into the rest. Rounds are spread over the window, so that long and short steps alternate. In a first epoch what is left is planned
anew when a part of the window has been trained. Invariants (asserted by the tests): each prompt is handed out once; no round is
expected to have a mean beyond the bound, unless its longest prompt is too long even beside the shortest. The real mean of a round
is known only when its responses have been drawn: the bound leaves room for most of that doubt, and `Mix` reports it.

`LengthEstimates`, in numbers. A prompt with earlier responses: their mean, drawn towards all prompts' mean by as much as chance
moves it (credibility: Z x + (1 - Z) m with Z = a / (a + v / n), Buehlmann 1967; a: variance between prompts, v: of one prompt's
responses, n: how many of them). Without: a predictor gives an order and no tokens, and what a rank is worth depends on how good
the order is. Ranks are put into bins, and a bin's lengths are those that prompts of its ranks turned out to have. Before there
are any the order is taken to be perfect, which overstates the long ranks: a bound on a mean errs on the safe side.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

from verl_mux.rollout.lengths.predictors import LengthPredictor, LengthRow, Prompt

TAILS = ("none", "defer")
MAX_MEAN = 2.0  # most that a round's mean length may be expected to be, as a multiple of its window's
# Standard deviations that are left between a round's expected mean and the bound: lengths are skewed, and no more than one round
# in some hundreds is to turn out beyond it.
_MARGIN = 2.5
_REPLANS = 8  # a window
# Lower ends of the bins of ranks: the tail is where ranks differ.
_EDGES = np.array([0.0, 0.25, 0.5, 0.75, 0.875, 0.9375, 0.96875, 0.984375])
_PRIOR_GROUPS = 8.0  # what the perfect order counts for in each bin
_REMEMBERED = 4096  # prompt groups whose lengths say how prompts in general are
_EPOCHS = 2  # of a prompt's own responses


class Expected(NamedTuple):
    """Of each prompt group, (prompts,) in tokens: the mean length of its responses, and that mean's variance."""

    mean: np.ndarray
    variance: np.ndarray


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
    if total == 0 or np.ptp(expected.mean) == 0:
        return [list(range(at, min(at + batch, total))) for at in range(0, total, batch)]
    order = np.argsort(-expected.mean, kind="stable")
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
    return [sorted(group.at for group in groups) for groups in [*_spread(rounds), *([left] if left else [])]]


def _round(left: Sequence[_Group], batch: int, most: float, margin: float) -> list[int]:
    """Places of one round in `left`, which has the longest first. margin: standard deviations below `most`."""
    shortest = left[:-batch:-1]  # the least that the places after the one at hand will get
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

    batch: prompt groups of a step. max_mean: most that a round's mean length may be expected to be, over its window's.
    """

    def __init__(self, batch: int, estimates: LengthEstimates, max_mean: float = MAX_MEAN) -> None:
        self._batch, self._estimates, self._max_mean = batch, estimates, max_mean
        self._prompts: dict[str, Prompt] = {}  # gathered and not trained
        self._rounds: list[list[str]] = []
        self._new = self._window = 0  # groups trained since the last plan; gathered at the last gathering
        self._means: list[float] = []  # of this window's groups that have been trained
        self._steps: list[float] = []  # and of its steps
        self._expected: dict[str, float] = {}  # tokens, of groups whose lengths differ; at the last plan
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
        """A step was trained: response lengths of its prompt groups; none, and nothing is learnt, of those that were given up."""
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
            most = self._max_mean
            foreseen = most * float(np.mean(expected)) / bound if expected else 1.0
            self.mix = Mix(self._steps[-1] / window, foreseen, sum(mean > most * window for mean in self._steps))

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint: the rounds as they are planned, and what the window was so far."""
        return {
            "rounds": self._rounds, "window": self._window, "means": self._means, "steps": self._steps,
            "expected": self._expected, "bound": self._bound,
        }  # fmt: skip

    def restore(self, saved: dict[str, Any], prompts: dict[str, Prompt]) -> None:
        """Resume. prompts: of the names in the rounds."""
        self._rounds, self._window = [list(names) for names in saved["rounds"]], saved["window"]
        self._prompts, self._means, self._steps = dict(prompts), list(saved["means"]), list(saved["steps"])
        self._expected, self._bound = dict(saved["expected"]), saved["bound"]

    def _names(self) -> list[str]:
        return [name for names in self._rounds for name in names]

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
        self._bound = self._max_mean * self._window_mean([*self._expected.values(), *expected.mean.tolist()])
        if np.ptp(expected.mean) > 0:
            self._expected |= dict(zip(names, expected.mean.tolist(), strict=True))
        self._rounds = [[names[at] for at in places] for places in plan(expected, self._batch, self._bound)]


# ---------------------------------------------------------------- estimates of lengths


class LengthEstimates:
    """observe(a prompt group's lengths) when it has been trained; expect(prompts) before any of them is drawn.

    samples: responses of a prompt group.
    """

    def __init__(self, predictor: LengthPredictor, samples: int) -> None:
        self._predictor, self._samples = predictor, samples
        self._own: dict[str, deque[int]] = {}
        self._spread: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)  # mean and variance of a group's lengths
        self._ranks: dict[str, float] = {}  # of prompts without a past, as they were predicted
        self._bins = np.zeros((3, len(_EDGES)))  # count, sum, sum of squares, of lengths over the mean of all

    def observe(self, prompt: Prompt, epoch: int, lengths: Sequence[int]) -> None:
        """A prompt group was trained, with these lengths in tokens."""
        self._predictor.observe([LengthRow(prompt, epoch, length) for length in lengths])
        own = self._own.setdefault(prompt.id, deque(maxlen=_EPOCHS * self._samples))
        own.extend(lengths)
        mean = float(np.mean(lengths))
        self._spread.append((mean, float(np.var(lengths, ddof=1)) if len(lengths) > 1 else 0.0))
        rank = self._ranks.pop(prompt.id, None)
        if rank is not None:
            relative = mean / max(self._overall(), 1e-9)
            self._bins[:, _bin(np.array([rank]))[0]] += (1.0, relative, relative**2)

    def expect(self, prompts: Sequence[Prompt]) -> Expected:
        """All alike before the first group was observed."""
        mean, variance = np.ones(len(prompts)), np.zeros(len(prompts))
        if not self._spread or not prompts:
            return Expected(mean, variance)
        known = np.array([prompt.id in self._own for prompt in prompts])
        mean[known], variance[known] = self._from_own([p.id for p, has in zip(prompts, known, strict=True) if has])
        strangers = [p for p, has in zip(prompts, known, strict=True) if not has]
        mean[~known], variance[~known] = self._from_order(strangers)
        return Expected(mean, variance)

    def knows(self, prompt: Prompt) -> bool:
        """Has this prompt had responses before? The lengths of other prompts say little of it then."""
        return prompt.id in self._own

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint: each prompt's own lengths. What the predictor has read is not kept."""
        return {"own": {id: list(lengths) for id, lengths in self._own.items()}, "spread": list(self._spread)}

    def restore(self, saved: dict[str, Any]) -> None:
        """Resume."""
        self._own = {id: deque(own, maxlen=_EPOCHS * self._samples) for id, own in saved["own"].items()}
        self._spread.extend((mean, variance) for mean, variance in saved["spread"])

    # ----------------------------------------------------------------

    def _overall(self) -> float:
        return float(np.mean([mean for mean, _ in self._spread]))

    def _from_own(self, ids: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, and the variance of the next group's mean. Chance grows with the length, so it is a prompt's own:
        v = chance * length^2. Only how far means are drawn towards that of all goes by the v of all: long ones would shrink."""
        means, variances = np.array(self._spread).T
        overall = float(means.mean())
        chance = float(variances.sum() / max((means**2).sum(), 1e-9))
        within = float(variances.mean())
        between = max(float(means.var()) - within / self._samples, 1e-9)
        own = np.array([np.mean(self._own[id]) for id in ids])
        count = np.array([len(self._own[id]) for id in ids])
        credibility = between / (between + within / np.maximum(count, 1))
        expected = credibility * own + (1 - credibility) * overall
        chances = chance * expected**2
        unknown = chances * between / (chances + count * between)  # of the prompt's own mean
        return expected, unknown + chances / self._samples

    def _from_order(self, prompts: Sequence[Prompt]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, and the variance of the group's mean."""
        means = np.array([mean for mean, _ in self._spread])
        overall = float(means.mean())
        scores = self._predictor.predict(prompts) if prompts else np.zeros(0)
        if len(prompts) < 2 or np.ptp(scores) == 0:
            return np.full(len(prompts), overall), np.full(len(prompts), float(means.var()))
        ranks = ranks_of(scores)
        self._ranks |= dict(zip((prompt.id for prompt in prompts), ranks.tolist(), strict=True))
        count, total, squares = self._bins + _PRIOR_GROUPS * _perfect(means / max(overall, 1e-9))
        mean = np.maximum.accumulate(total / count)  # a higher rank is never expected to be shorter
        variance = np.maximum(squares / count - (total / count) ** 2, 0.0)
        bins = _bin(ranks)
        # Within a bin too the order counts: a little, so that it decides among equals.
        return overall * mean[bins] * (1 + 1e-6 * ranks), overall**2 * variance[bins]


def ranks_of(scores: np.ndarray) -> np.ndarray:
    """Share of the others below each, in [0, 1), ties in their middle: (prompts,) float64."""
    ordered = np.sort(scores)
    low, high = np.searchsorted(ordered, scores, side="left"), np.searchsorted(ordered, scores, side="right")
    return (low + high) / 2 / (len(scores) + 1e-9)


def _bin(ranks: np.ndarray) -> np.ndarray:
    return np.searchsorted(_EDGES, ranks, side="right") - 1


def _perfect(past: np.ndarray) -> np.ndarray:
    """Moments of each bin, did the order sort these: (3, bins)."""
    cuts = (_EDGES[1:] * len(past)).astype(int)
    parts = np.split(np.sort(past), cuts) if len(past) * (1 - _EDGES[-1]) > 1 else [past] * len(_EDGES)
    return np.array([np.ones(len(_EDGES)), [part.mean() for part in parts], [(part**2).mean() for part in parts]])
