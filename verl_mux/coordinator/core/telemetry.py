"""What jobs report for people to see; nothing of it decides who runs, except that finished steps count for turns, and those that
are left for turns and for whether a move pays."""

from __future__ import annotations

from collections.abc import Callable

from verl_mux.coordinator.bus import limits
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.inputs_and_instructions import Instruction, Log, Send
from verl_mux.coordinator.core.records import Job, State
from verl_mux.profiling.eventlog import events


def progress(state: State, job: Job, what: m.Progress) -> list[Instruction]:
    job.progress = (what.done, what.total)
    return []


def step_report(state: State, job: Job, what: m.StepReport) -> list[Instruction]:
    job.reported, job.metrics = max(job.reported, what.step), what.metrics
    job.steps = job.steps if what.steps is None else what.steps
    return [Log(events.STEP_REPORT, {"job": job.name, **what.metrics}, step=what.step)]


def memory(state: State, job: Job, what: m.MemoryReport) -> list[Instruction]:
    tags = {**job.memory.get(what.node, {}), **what.tags}
    held = {tag: num_bytes for tag, num_bytes in tags.items() if num_bytes > 0}
    if reason := _unbelievable(job, what.node, held):
        return [Send(what.client, m.Refused(about="memory", reason=reason))]
    job.memory[what.node] = held
    count_peak(state, what.node)
    extra = {"job": job.name, "node": what.node, "tags": what.tags, "node_bytes": state.bytes_on(what.node)}
    return [Log(events.MEMORY, extra)]


def _unbelievable(job: Job, node: str, tags: dict[str, int]) -> str | None:
    """Why the report is not kept: whoever makes up nodes and tags must not fill our memory with them."""
    if node not in job.all_nodes:
        return f"job {job.name!r} reports memory on {node!r}; allowed: its nodes {', '.join(job.all_nodes)}"
    if len(tags) > limits.TAGS_ON_A_NODE:
        return f"job {job.name!r} reports {len(tags)} tags on {node!r}; at most {limits.TAGS_ON_A_NODE} are allowed"
    return None


def note(state: State, job: Job, what: m.PhaseNote) -> list[Instruction]:
    job.note = what.note
    return []


def members(state: State, job: Job, what: m.MemberReport) -> list[Instruction]:
    job.members = what.members
    return []


def count_peak(state: State, node: str) -> None:
    """Peaks are counted apart for init and for each segment, since comparing segments is what they are for."""
    during = str(state.segment) if state.stepping else "init"
    peaks = state.peaks.setdefault(node, {})
    peaks[during] = max(peaks.get(during, 0), state.bytes_on(node))


REPORTS: dict[type[m.FromJob], Callable[..., list[Instruction]]] = {
    m.Progress: progress,
    m.StepReport: step_report,
    m.MemoryReport: memory,
    m.PhaseNote: note,
    m.MemberReport: members,
}
