"""One bar chart per claim, paper beside ours, and the schedules of figure 10 as predicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from research.paper.figure import Figure
from research.paper.schedules import CASES, Case
from verl_mux.placement.group_run import TRAIN, masks, planned_run
from verl_mux.placement.model import Group

_COLOURS = ("#2f6fb3", "#d9822b", "#3a9d6e")


def draw(figures: Sequence[Figure], directory: Path) -> None:
    """Writes `<claim>.png` for each claim among the figures, and `schedules.png` with R1."""
    import matplotlib

    matplotlib.use("Agg")
    directory.mkdir(parents=True, exist_ok=True)
    for claim in dict.fromkeys(figure.claim for figure in figures):
        both = [figure for figure in figures if figure.claim == claim and figure.ours is not None]
        if both:
            _bars(both, directory / f"{claim}.png")
    if any(figure.claim == "R1" for figure in figures):
        _schedules(directory / "schedules.png")


def _bars(figures: Sequence[Figure], path: Path) -> None:
    from matplotlib import pyplot

    chart, axes = pyplot.subplots(figsize=(9, 1 + 0.4 * len(figures)), constrained_layout=True)
    rows = range(len(figures))
    axes.barh([r - 0.2 for r in rows], [f.paper or 0 for f in figures], height=0.38, label="paper", color="#9aa5b1")
    axes.barh([r + 0.2 for r in rows], [f.ours for f in figures], height=0.38, label="ours", color=_COLOURS[0])
    axes.set_yticks(list(rows), [f"{f.name} [{f.unit}]" for f in figures], fontsize=8)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    chart.savefig(path, dpi=110)
    pyplot.close(chart)


def _schedules(path: Path) -> None:
    from matplotlib import pyplot

    chart, panels = pyplot.subplots(2 * len(CASES), 1, figsize=(12, 11), constrained_layout=True)
    for i, case in enumerate(CASES.values()):
        end = max(end for bars in case.bars.values() for _, end in bars)
        _lanes(panels[2 * i], measured_bars(case), f"figure 10{case.panel}, read off the paper", end)
        _lanes(panels[2 * i + 1], predicted_bars(case.group(), end), "predicted", end)
    panels[-1].set_xlabel("seconds")
    chart.savefig(path, dpi=90)
    pyplot.close(chart)


Bar = tuple[str, int, float, float]


def measured_bars(case: Case) -> list[Bar]:
    """(node, number of the job, start, end) as drawn in the paper; a job's nodes of one side are one lane."""
    jobs = list(case.jobs)
    return [
        (_lane(case, job, phase), jobs.index(job), start, end) for (job, phase), bars in case.bars.items() for start, end in bars
    ]


def _lane(case: Case, job: str, phase: str) -> str:
    return case.jobs[job][2][-1] if phase == "roll" else "t1"


def predicted_bars(group: Group, until: float) -> list[Bar]:
    """The same from the events, from the common start to `until` seconds."""
    run = planned_run(group.jobs, *masks(group), group.order)
    names = [job.name for job in group.jobs]
    bars = []
    while run.now < until:
        run.next_end()
        index = run.ends.index(min(run.ends))
        member = run.members[index]
        phase, end = member.phase, run.ends[index]
        since = member.since
        run.step()
        pin = group.pins[index]
        lanes = ("t1",) if phase == TRAIN else pin.rollout
        bars += [(lane, names.index(member.name), since, end) for lane in lanes]
    return bars


def _lanes(axes, bars: Sequence[Bar], title: str, end: float) -> None:
    lanes = sorted({lane for lane, *_ in bars})
    for lane, job, start, stop in bars:
        axes.barh(lanes.index(lane), stop - start, left=start, height=0.7, color=_COLOURS[job], edgecolor="white")
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_xlim(0, end)
    axes.set_title(title, fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
