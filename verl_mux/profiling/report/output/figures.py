"""The report's pictures as PNG files, for a paper or a ticket."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.measures.completion import CUT
from verl_mux.profiling.report.measures.leases import WORK

DPI = 140
MAX_STEPS = 8
COLOURS = ["#2f6fb7", "#d9681d", "#1f9d78", "#b1579a", "#b8900a", "#4aa3cf", "#7a5bd0", "#8a6d5a"]


def draw(analysis: Analysis, summary: dict[str, Any], directory: str | Path) -> list[Path]:
    """Writes completion.png, shares.png, workers.png, turns.png and lanes.png, and for chosen steps cdf_<job>_<step>.png, as far
    as there is data; returns their paths."""
    from matplotlib.figure import Figure  # the class, not pyplot: no display, no global state

    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, drawer in _drawers(analysis, summary).items():
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        if drawer(figure.subplots(), analysis):
            figure.savefig(folder / f"{name}.png", dpi=DPI)
            written.append(folder / f"{name}.png")
    return written


def _drawers(analysis: Analysis, summary: dict[str, Any]) -> dict[str, Any]:
    fixed = {"completion": _completion, "shares": _shares, "workers": _workers, "turns": _turns, "lanes": _lanes}
    return fixed | {_file_name(job, step): partial(_step, job, step) for job, step in _chosen(analysis, summary)}


def _chosen(analysis: Analysis, summary: dict[str, Any]) -> list[tuple[str, int]]:
    """Steps that findings name, then the slowest ones; MAX_STEPS in all."""
    known = analysis.by_step.sort("total", descending=True).select("job", "step").rows()
    named = [(it["job"], it["step"]) for it in summary["findings"]]
    return [place for place in dict.fromkeys([*named, *known]) if place in set(known)][:MAX_STEPS]


def _file_name(job: str, step: int) -> str:
    return "_".join(["cdf", *([re.sub(r"[^\w.-]", "-", job)] if job else []), str(step)])


def _step(job: str, step: int, axes: Any, analysis: Analysis) -> bool:
    """Part of each worker's requests done over the time since the step's first start; a line a worker (a replica, where the log
    says it), and where four fifths of all were done and a half more of that time."""
    here = analysis.finished.filter((pl.col("job") == job) & (pl.col("step") == step))
    start = here["start"].min()
    what = "replica" if job in analysis.engines.jobs else "worker"
    for colour, ((unit,), rows) in zip(COLOURS * 99, here.sort("unit").group_by("unit", maintain_order=True), strict=False):
        ends = np.sort(rows["end"].to_numpy()) - start
        axes.step(ends, np.arange(1, len(ends) + 1) / len(ends), where="post", color=colour, lw=1.2, label=f"{what} {unit}")
    at80 = float(here["end"].quantile(0.8, "higher")) - start
    for at, style in ((at80, "--"), (CUT * at80, ":")):
        axes.axvline(at, color="#999", lw=0.9, ls=style)
    axes.set(xlabel="seconds since the step's first request", ylabel="part of the requests done", ylim=(0, 1.02), xlim=(0, None))
    axes.set_title(f"{job} step {step}: dashed t80, dotted {CUT:g} x t80".strip(), fontsize=9)
    if here["unit"].n_unique() <= 16:
        axes.legend(frameon=False, fontsize=7)
    return True


def _turns(axes: Any, analysis: Analysis) -> bool:
    """Mean seconds in engines of the first, second, ... turn, step by step."""
    turns = analysis.turns.filter(pl.col("turn") <= len(COLOURS))
    if turns.is_empty() or turns["turn"].max() < 2:
        return False
    means = turns.group_by("step", "turn").agg(pl.col("engine").mean()).sort("turn", "step")
    for colour, ((turn,), rows) in zip(COLOURS, means.group_by("turn", maintain_order=True), strict=False):
        axes.plot(rows["step"], rows["engine"], color=colour, marker="o", ms=3, label=f"turn {turn}")
    axes.set(xlabel="step", ylabel="seconds in engines, mean", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)
    return True


def _completion(axes: Any, analysis: Analysis) -> bool:
    """Part of a step's requests done over the time since its start; a line a step."""
    done = analysis.finished
    if done.is_empty():
        return False
    groups = list(done.group_by("job", "step", maintain_order=True))
    for index, ((job, step), rows) in enumerate(groups):
        ends = np.sort(rows["end"].to_numpy()) - rows["start"].min()
        label = f"{job} step {step}".strip() if len(groups) <= 10 else None
        colour = COLOURS[index % len(COLOURS)] if len(groups) <= 10 else "#2f6fb7"
        axes.step(ends, np.arange(1, len(ends) + 1) / len(ends), where="post", color=colour, alpha=0.8, lw=1.3, label=label)
    axes.axhline(0.8, color="#999", lw=0.8, ls="--")
    axes.set(xlabel="seconds since the step's first request", ylabel="part of the requests done", ylim=(0, 1.02), xlim=(0, None))
    if len(groups) <= 10:
        axes.legend(frameon=False, fontsize=8)
    return True


def _shares(axes: Any, analysis: Analysis) -> bool:
    """What each step is made of."""
    shares = analysis.step_shares
    if shares.is_empty():
        return False
    role = "trainer" if "trainer" in set(shares["role"]) else shares["role"][0]
    rows = shares.filter(pl.col("role") == role)
    top = rows.group_by("event").agg(pl.col("share").sum()).sort("share", descending=True)["event"].to_list()[:7]
    steps = rows.select("job", "step").unique(maintain_order=True).rows()
    bottom = np.zeros(len(steps))
    for colour, event in zip(COLOURS, top, strict=False):
        mine = rows.filter(pl.col("event") == event)
        found = dict(zip(mine.select("job", "step").rows(), mine["share"], strict=True))
        heights = np.array([100 * found.get(step, 0.0) for step in steps])
        axes.bar(range(len(steps)), heights, bottom=bottom, color=colour, label=event, width=0.9)
        bottom += heights
    every = max(1, len(steps) // 16)
    names = [f"{job} {step}".strip() for job, step in steps[::every]]
    axes.set_xticks(range(0, len(steps), every), names, rotation=45, fontsize=7)
    axes.set(ylabel="% of the step")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return True


def _workers(axes: Any, analysis: Analysis) -> bool:
    """When each worker of the slowest step was done."""
    rows = analysis.by_worker
    if rows.is_empty():
        return False
    worst = rows.sort("total", descending=True).row(0, named=True)
    here = rows.filter((pl.col("job") == worst["job"]) & (pl.col("step") == worst["step"])).sort("worker")
    names = [str(worker) for worker in here["worker"]]
    axes.barh(names, here["total"], color="#c9d6e6", label="all requests")
    axes.barh(names, here["p80"], color="#2f6fb7", label="80 % of them")
    axes.set(xlabel="seconds", ylabel="worker", title=f"{worst['job']} step {worst['step']}, the slowest".strip())
    axes.legend(frameon=False, fontsize=8)
    axes.invert_yaxis()
    return True


def _lanes(axes: Any, analysis: Analysis) -> bool:
    """Who held which node."""
    leases = analysis.leases
    holds = [hold for hold in leases.holds if hold.phase in WORK]
    if not holds:
        return False
    origin, jobs = holds[0].start, sorted({hold.job for hold in holds})
    nodes = [node for names in leases.pools.values() for node in names]
    for job, colour in zip(jobs, COLOURS * 9, strict=False):
        for row, node in enumerate(nodes):
            mine = [(h.start - origin, h.end - h.start) for h in holds if h.job == job and node in h.nodes]
            axes.broken_barh(mine, (row - 0.4, 0.8), facecolors=colour, label=job if row == 0 else None)
    axes.set_yticks(range(len(nodes)), nodes)
    axes.set(xlabel="seconds")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return True
