"""Pictures of a comparison: cost over time, and the figures of every policy beside each other."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from research.outcome import Run
from research.simulate import Comparison


def draw(comparison: Comparison, directory: Path) -> None:
    """Writes cost.png (first seed, over time) and policies.png (means over the seeds) into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    _cost(comparison.runs, directory / "cost.png")
    _policies(comparison.report, directory / "policies.png")


def _cost(runs: dict[str, Run], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(10, 4))
    for name, run in runs.items():
        hours, usd = zip(*((since / 3600, rate) for since, rate in run.ledger.samples), strict=True)
        axes.step(hours, usd, where="post", label=name, linewidth=0.9)
    axes.set_xlabel("hours since the first arrival")
    axes.set_ylabel("USD per hour")
    axes.legend()
    _save(figure, path)


def _policies(report: dict, path: Path) -> None:
    found = report["policies"]
    figure, (cost, slo) = plt.subplots(1, 2, figsize=(10, 4))
    cost.bar(list(found), [f["usd_per_hour_mean"] for f in found.values()])
    cost.set_ylabel("USD per hour, mean")
    slo.bar(list(found), [100 * f["slo_attainment"] for f in found.values()])
    slo.set_ylabel("SLO attainment, %")
    for axes in (cost, slo):
        axes.tick_params(axis="x", rotation=30)
    _save(figure, path)


def _save(figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)
