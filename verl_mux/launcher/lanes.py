"""A picture of a run: one lane a node, one colour a job, hatched where a phase syncs weights."""

from __future__ import annotations

from pathlib import Path

from verl_mux.coordinator.core.settings import Config
from verl_mux.launcher.summary import segment_steps
from verl_mux.launcher.timeline import Timeline

# A step's number has room in a span of so much of the picture.
_LABELLED = 0.008
_COLOURS = ("#2f6fb3", "#d9822b", "#3a9d6e", "#a34fa8", "#c23b3b", "#6b7280")


def draw(timeline: Timeline, config: Config, jobs: list[str], path: Path) -> None:
    """Write the lanes of the run's steps to `path` (PNG)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    spans = [span for span in timeline.phases if span.step > 0]
    if not spans:
        return
    start = min(span.start for span in spans)
    whole = max(span.end for span in spans) - start
    lanes = [(f"{pool}  {node.name}", node.name) for pool, entry in config.pools.items() for node in entry.nodes]
    figure, axes = pyplot.subplots(figsize=(14, 1.4 + 0.75 * len(lanes)), constrained_layout=True)
    colours = {job: _COLOURS[i % len(_COLOURS)] for i, job in enumerate(jobs)}
    for row, (_, node) in enumerate(lanes):
        here = [span for span in spans if node in span.nodes]
        for job in dict.fromkeys(span.job for span in here):  # one shape for all of a job: a run of weeks has a million spans
            bars = [(span.start - start, span.seconds) for span in here if span.job == job]
            axes.broken_barh(bars, (row - 0.35, 0.7), facecolors=colours[job])
        for span in here:
            _label(axes, row, span, start, whole)
    _mark_segments(axes, timeline, config, jobs, start)
    axes.set_yticks(range(len(lanes)), [name for name, _ in lanes])
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the first lease")
    axes.margins(x=0.005)
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=colours[job], label=f"job {job}") for job in jobs]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, 1.25), ncols=len(jobs), frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _label(axes, row: int, span, start: float, whole: float) -> None:
    if span.seconds > _LABELLED * whole:
        axes.text(span.start - start + span.seconds / 2, row, str(span.step), ha="center", va="center", color="white", fontsize=7)


def _mark_segments(axes, timeline: Timeline, config: Config, jobs: list[str], start: float) -> None:
    words = {"sequential": "one after the other", "uncoordinated": "uncoordinated", "interleaved": "interleaved"}
    for mode, first, _ in segment_steps(config.schedule):
        begins = [s.start for s in timeline.phases if s.step == first and s.job in jobs]
        if begins:
            axes.axvline(min(begins) - start, color="#888888", linewidth=1, linestyle=":")
            axes.text(min(begins) - start, -0.5, f" {words[mode]}", fontsize=9, color="#444444", va="bottom")
