"""Reward by step, of each mode beside `plain`: as far apart as seeds are?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from bench.rollouts.modes import PLAIN, Run

_REWARD = "critic/score/mean"
_COLOURS = ("#2f6fb3", "#d9822b", "#3a9d6e", "#a34fa8", "#c23b3b", "#6b7280")

Curves = Mapping[str, Mapping[int, Sequence[float]]]  # rewards by mode and seed, from the first step on


def curves_of(runs: Sequence[Run]) -> dict[str, dict[int, list[float]]]:
    """Of the training samples of each step."""
    out: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        out.setdefault(run.mode, {})[run.seed] = [run.metrics[step][_REWARD] for step in sorted(run.metrics)]
    return out


def compare(curves: Curves, base: str = PLAIN) -> dict[str, dict[str, Any]]:
    """Of each mode that ran with the seeds of `base`, of more than one.

    apart: distance of the two means over seeds, a mean over steps. spread: largest less smallest seed of `base`, a mean over
    steps. equal: part of all steps of all seeds with the same reward, to the last bit.
    """
    beside = curves.get(base, {})
    return {
        mode: _beside(of_seeds, beside)
        for mode, of_seeds in curves.items()
        if mode != base and len(beside) > 1 and of_seeds.keys() == beside.keys()
    }


def _beside(one: Mapping[int, Sequence[float]], base: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    mine, theirs = (list(zip(*(of_seeds[seed] for seed in base), strict=True)) for of_seeds in (one, base))  # by step
    apart = mean(abs(mean(a) - mean(b)) for a, b in zip(mine, theirs, strict=True))
    spread = mean(max(rewards) - min(rewards) for rewards in theirs)
    equal = mean(x == y for a, b in zip(mine, theirs, strict=True) for x, y in zip(a, b, strict=True))
    return {"apart": apart, "spread": spread, "within_spread": apart <= spread, "equal": equal}


def draw(curves: Curves, path: Path) -> None:
    """A thin line a seed and a thick one for their mean, a colour a mode; PNG."""
    from matplotlib.figure import Figure  # the class, not pyplot: no display, no global state

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for at, (mode, of_seeds) in enumerate(curves.items()):
        colour, style = _COLOURS[at % len(_COLOURS)], ("-", "--")[at % 2]
        for rewards in of_seeds.values():
            axes.plot(range(1, len(rewards) + 1), rewards, style, color=colour, lw=0.8, alpha=0.5)
        means = [mean(step) for step in zip(*of_seeds.values(), strict=True)]
        axes.plot(
            range(1, len(means) + 1), means, style, color=colour, lw=2.2, label=f"{mode}, {len(of_seeds)} seeds and their mean"
        )
    axes.set(xlabel="step", ylabel="reward of the step's samples")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=90)
