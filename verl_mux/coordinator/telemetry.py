"""What jobs report for people to see; nothing of it decides who runs, except that a finished step counts for turns."""

from __future__ import annotations

from verl_mux.coordinator import messages as m
from verl_mux.coordinator.events import Instruction, Log
from verl_mux.coordinator.records import Job, State


def progress(state: State, job: Job, what: m.Progress) -> list[Instruction]:
    job.progress = (what.done, what.total)
    return []


def step_report(state: State, job: Job, what: m.StepReport) -> list[Instruction]:
    job.reported, job.metrics, job.initialised = max(job.reported, what.step), what.metrics, True
    return [Log("step_report", {"job": job.name, **what.metrics}, step=what.step)]


def memory(state: State, job: Job, what: m.MemoryReport) -> list[Instruction]:
    tags = {**job.memory.get(what.node, {}), **what.tags}
    job.memory[what.node] = {tag: num_bytes for tag, num_bytes in tags.items() if num_bytes > 0}
    count_peak(state, what.node)
    extra = {"job": job.name, "node": what.node, "tags": what.tags, "node_bytes": state.bytes_on(what.node)}
    return [Log("memory", extra)]


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


REPORTS = {
    m.Progress: progress,
    m.StepReport: step_report,
    m.MemoryReport: memory,
    m.PhaseNote: note,
    m.MemberReport: members,
}
