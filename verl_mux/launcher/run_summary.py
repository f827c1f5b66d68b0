"""The figures of a run, from its intervals: steps alone and multiplexed, where the time went, and a picture of the lanes.

Runs in the launcher; called by command.py and bench/; writes the picture only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, median

from verl_mux.coordinator.core.settings import Config, Segment
from verl_mux.launcher import cores
from verl_mux.launcher.cores import Interval
from verl_mux.launcher.run_intervals import Span, Timeline
from verl_mux.profiling.plain.intervals import clip, length, throughput_ratio

PHASES = ("rollout", "train", "sync", "sleep", "wake", "wait_rollout", "wait_train")
_REWARD_STEPS = 3


def segment_steps(schedule: list[Segment]) -> list[tuple[str, int, int]]:
    """(mode, first step, last step) of every segment; the last one is open."""
    segments: list[tuple[str, int, int]] = []
    first = 1
    for segment in schedule:
        last = first + segment.steps - 1 if segment.steps else 10**9
        segments.append((segment.mode, first, last))
        first = last + 1
    return segments


def periods(timeline: Timeline, job: str, first: int, last: int, until: float = float("inf")) -> list[float]:
    """Seconds from one step's end to the next, for steps in (first, last] that ended before `until`.

    The segment's first step is left out: it may have begun behind the barrier. So is the first after the job was resumed.
    """
    ends = {span.step: span.end for span in timeline.of(job, "steps")}
    return [ends[s] - ends[s - 1] for s in _follow(timeline, job, ends) if first < s <= last and ends[s] <= until]


def _follow(timeline: Timeline, job: str, ends: dict[int, float]) -> list[int]:
    """Steps that the job began when it ended the one before."""
    return [s for s in sorted(ends) if s - 1 in ends and timeline.unbroken(job, ends[s - 1], ends[s])]


def summarise(
    timeline: Timeline, config: Config, jobs: list[str], peak_rss_bytes: int, startup_s: float, intervals: Sequence[Interval] = ()
) -> dict:
    """The content of `summary.json`. Jobs that never finished a step are left out. intervals: the run's processor time."""
    segments = segment_steps(config.schedule)
    jobs = [job for job in jobs if timeline.of(job, "steps")]
    alone = median_periods(timeline, jobs, segments, "sequential")
    both = median_periods(timeline, jobs, segments, "interleaved")
    first = max((s for mode, s, _ in segments if mode == "interleaved"), default=1)
    return {
        "jobs": {job: _job(timeline, job, alone[job], both[job], first) for job in jobs},
        "mux": {
            "throughput_ratio": throughput_ratio(alone, both),
            **cores.figures(intervals, config, _alone_windows(timeline, jobs, segments), _window(timeline, jobs, segments)),
            "token_throughput_ratio": token_throughput_ratio(timeline, jobs, segments),
            "sample_to_lease_s": sample_to_lease(timeline, jobs),
            "bubble": {pool: bubble(timeline, config, pool, jobs, segments) for pool in config.pools},
            "peak_rss_bytes": peak_rss_bytes,
            "startup_s": round(startup_s, 3),
        },
    }


def _alone_windows(timeline: Timeline, jobs: list[str], segments) -> list[tuple[float, float]]:
    parts = [(first, last) for mode, first, last in segments if mode == "sequential"]
    return [window for first, last in parts for window in cores.windows_alone(timeline, jobs, first, last)]


def startup(timeline: Timeline, since: float) -> float:
    """Seconds until the first job asked for its first step; 0 if none did. `since`: the run's start, epoch seconds."""
    return min((wait.start - since for wait in timeline.waits if wait.step > 0 and wait.start >= since), default=0.0)


def token_throughput_ratio(timeline: Timeline, jobs: list[str], segments) -> float | None:
    """As throughput_ratio, in tokens per second: steps grow and shrink with the responses while a job learns."""
    alone = {job: _tokens_and_seconds(timeline, job, segments, "sequential") for job in jobs}
    both = {job: _tokens_and_seconds(timeline, job, segments, "interleaved", _all_alive_until(timeline, jobs)) for job in jobs}
    if not jobs or not all(tokens and seconds for tokens, seconds in (*alone.values(), *both.values())):
        return None
    one_after_the_other = sum(tokens for tokens, _ in alone.values()) / sum(seconds for _, seconds in alone.values())
    return round(sum(tokens / seconds for tokens, seconds in both.values()) / one_after_the_other, 4)


def _tokens_and_seconds(timeline: Timeline, job: str, segments, mode: str, until: float = float("inf")) -> tuple[float, float]:
    spans = {span.step: span for span in timeline.of(job, "steps")}
    ends = {step: span.end for step, span in spans.items()}
    steps = [s for m, first, last in segments if m == mode for s in _follow(timeline, job, ends) if first < s <= last]
    counted = [s for s in steps if ends[s] <= until]
    return sum(spans[s].extra.get("tokens", 0) for s in counted), sum(ends[s] - ends[s - 1] for s in counted)


def sample_to_lease(timeline: Timeline, jobs: list[str]) -> float | None:
    """Median seconds from a step's last finished sample to asking for the training lease."""
    last = {(request.job, request.step): request.end for request in timeline.requests}
    asked = [s for s in timeline.waits if s.name == "train" and s.job in jobs and (s.job, s.step) in last]
    return round(median(s.start - last[s.job, s.step] for s in asked), 4) if asked else None


def bubble(timeline: Timeline, config: Config, pool: str, jobs: list[str], segments) -> float | None:
    """Share of a pool's node-seconds without a phase, while all jobs interleave; from intervals."""
    window = _window(timeline, jobs, segments)
    if window is None:
        return None
    nodes = [node.name for node in config.pools[pool].nodes]
    busy = sum(length(clip(_held(timeline.phases, node), window)) for node in nodes)
    return round(1 - busy / (len(nodes) * (window[1] - window[0])), 4)


def _job(timeline: Timeline, job: str, alone: float | None, both: float | None, first: int) -> dict:
    steps = timeline.of(job, "steps")
    given = (span.extra.get("reward") for span in steps)  # null: it was no number
    rewards = [reward for reward in given if isinstance(reward, (int, float))] or [0.0]
    return {
        "steps": len(steps),
        "reward_first": round(mean(rewards[:_REWARD_STEPS]), 4),
        "reward_last": round(mean(rewards[-_REWARD_STEPS:]), 4),
        "period_alone_s": alone,
        "period_mux_s": both,
        "phase_s": {name: _median_seconds(timeline, job, name, first) for name in PHASES},
    }


def _median_seconds(timeline: Timeline, job: str, name: str, first: int) -> float:
    """Median over interleaved steps of the seconds a step spent in a phase, a part or a wait; what overlaps counts once."""
    if name.startswith("wait_"):
        spans: Iterable[Span] = (s for s in timeline.of(job, "waits") if s.name == name.removeprefix("wait_"))
    else:
        kind = "phases" if name in ("rollout", "train") else "parts"
        spans = (s for s in timeline.of(job, kind) if s.name == name)
    by_step: dict[int, list[tuple[float, float]]] = {}
    for span in spans:
        if span.step > first:
            by_step.setdefault(span.step, []).append((span.start, span.end))
    return round(median(map(length, by_step.values())), 4) if by_step else 0.0


def _median_period(timeline: Timeline, job: str, segments, mode: str, until: float = float("inf")) -> float | None:
    found = [p for m, first, last in segments if m == mode for p in periods(timeline, job, first, last, until)]
    return round(median(found), 4) if found else None


def median_periods(timeline: Timeline, jobs: list[str], segments, mode: str) -> dict[str, float | None]:
    """Each job's median step period in the segments of `mode`, while all jobs were alive."""
    until = _all_alive_until(timeline, jobs) if mode != "sequential" else float("inf")
    return {job: _median_period(timeline, job, segments, mode, until) for job in jobs}


def _all_alive_until(timeline: Timeline, jobs: list[str]) -> float:
    return min(timeline.of(job, "steps")[-1].end for job in jobs) if jobs else 0.0


def _window(timeline: Timeline, jobs: list[str], segments) -> tuple[float, float] | None:
    """From when every job has begun to interleave, for the last time if they were resumed, until the first of them ends."""
    firsts = [first for mode, first, _ in segments if mode == "interleaved"]
    if not firsts or not jobs:
        return None
    began = max((start for job in jobs for start in timeline.starts.get(job, ())), default=0.0)
    ends = {job: [s.end for s in timeline.of(job, "steps") if s.step >= firsts[0] and s.end > began] for job in jobs}
    begun = [found[0] for found in ends.values() if found]
    end = _all_alive_until(timeline, jobs)
    return (max(begun), end) if len(begun) == len(jobs) and end > max(begun) else None


def _held(phases: list[Span], node: str) -> list[tuple[float, float]]:
    return [(span.start, span.end) for span in phases if node in span.nodes]


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
