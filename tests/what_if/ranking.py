"""What-if's ranking of keys, beside the simulation of the whole.

Lengths run through the second simulator with everything off, and what that run would have logged is written as an event log.
Report and what-if read the log and rank the keys; the truth is the same lengths through the second simulator under each key,
whose engines share no code with those of what-if.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from scipy.stats import kendalltau

from tests.what_if.second_simulator import Arrival, Bed, Deferred, Key, Recording, Replica, Request, VirtualJob, recording
from verl_mux.profiling.plain.lines import find_log_files
from verl_mux.profiling.report.input.run_log import read_files
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.rollout.control.oversampling import Oversampler
from verl_mux.rollout.control.segments import SegmentLimits, SegmentSteps
from verl_mux.rollout.lengths.predictors import LengthRow
from verl_mux.what_if.recorded_run import recordings, stays_of
from verl_mux.what_if.what_if import WhatIf

EPOCH = datetime(2025, 8, 11, 23, 0, 0)
BED = Bed(batch=8, slots=1000, step_s=0.02, request_s=0.0005, prefill_s=2e-5, train_token_s=2e-3, replicas=2)
PROMPT_TOKENS = 90
TRAINED_PART = 0.8  # of them: over-sampling draws ahead, and must find some at the end too
WARM_PART = 0.25  # of the steps, in which left-overs build up, as what-if leaves them out


@dataclass(frozen=True)
class Stay:
    """One request in one replica, from when it was submitted until it ended: seconds of the run."""

    step: int
    key: Key
    replica: int
    start: float
    end: float
    tokens: int


@dataclass(frozen=True)
class Ran:
    """steps: (start, end of the rollout, end of the training, tokens trained). waits: seconds for leases by step."""

    steps: list[tuple[float, float, float, int]]
    stays: list[Stay]
    waits: dict[int, float] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """Mean seconds of a step after the first ones."""
        kept = self.steps[round(WARM_PART * len(self.steps)) :]
        return (kept[-1][2] - kept[0][0]) / len(kept)


def run(job: VirtualJob, bed: Bed, steps: int) -> Ran:
    """`steps` steps of one job, alone."""
    replicas = [Replica(bed) for _ in range(bed.replicas)]
    began: dict[Key, tuple[float, int]] = {}
    now, ran = 0.0, Ran([], [])

    def submit(request: Request) -> None:
        number = min(range(bed.replicas), key=lambda at: replicas[at].requests)
        began[request.key] = now, number
        replicas[number].submit(request)

    job.submit, job.abort = submit, lambda key: next((t for r in replicas if (t := r.abort(key)) is not None), None)
    while len(ran.steps) < steps and not job.over:
        for replica in replicas:
            replica.at = now
        start = now
        job.begin()
        while not job.finished:
            now = min(replica.next_end() for replica in replicas)
            for request in [request for replica in replicas for request in replica.advance(now)]:
                at, number = began.pop(request.key)
                ran.stays.append(Stay(job.step, request.key, number, at, now, request.more))
                job.ended(request)
        end = now
        now += job.batch_tokens * bed.train_token_s
        ran.steps.append((start, end, now, job.batch_tokens))
    return ran


def virtual_job(recorded: Recording, machine: Oversampler | SegmentSteps, bed: Bed) -> VirtualJob:
    return VirtualJob(machine, Arrival(recorded), bed.batch)


def plain(recorded: Recording, bed: Bed) -> VirtualJob:
    return virtual_job(recorded, Oversampler(recorded.samples), bed)


def cut(recorded: Recording, longest: int) -> Recording:
    """With no response longer."""
    return replace(
        recorded,
        epochs=tuple(
            tuple(replace(group, lengths=tuple(min(length, longest) for length in group.lengths)) for group in epoch)
            for epoch in recorded.epochs
        ),
    )


# Keys as a user types them -> the whole under them.
Whole = Callable[[Recording, Bed], VirtualJob]


def candidates(longest: int, recurs: bool) -> Iterator[tuple[dict[str, str], Whole]]:
    """What advice would try, and more of it."""
    if recurs:
        yield (
            {"mux.rollout.tail": "defer"},
            lambda recorded, bed: VirtualJob(Oversampler(recorded.samples), Deferred(recorded, bed.batch), bed.batch),
        )
    over, segments = "mux.rollout.oversample", "mux.rollout.segments"
    for rate in (0.25, 0.5, 1.0):
        yield (
            {f"{over}.rate": f"{rate:g}", f"{over}.max_cuts": "8"},
            lambda recorded, bed, rate=rate: virtual_job(recorded, Oversampler(recorded.samples, rate, max_cuts=8), bed),
        )
    for parts in (4, 2):
        limits = SegmentLimits(-(-longest // parts), parts, longest)
        yield (
            {f"{segments}.segment_length": str(limits.segment_length), f"{segments}.max_segments": str(parts)},
            lambda recorded, bed, limits=limits: virtual_job(recorded, SegmentSteps(limits, recorded.samples), bed),
        )
    for part in (0.75, 0.5, 0.3):
        most = max(1, round(part * longest))
        yield (
            {"data.max_response_length": str(most)},
            lambda recorded, bed, most=most: plain(cut(recorded, most), bed),
        )


def write_log(ran: Ran, directory: Path, job: str = "a", nodes: Sequence[str] = ("r0",)) -> None:
    """What the run would have logged, as `docs/event_log.md` has it. nodes: replicas take turns on them."""
    lines: dict[tuple[str, int, int], list[tuple[float, str]]] = defaultdict(list)

    def log(role: str, worker: int, step: int, end: float, event: str, seconds: float | None, **extra) -> None:
        line = {"timestamp": (EPOCH + timedelta(seconds=end)).isoformat(timespec="microseconds"), "event": event}
        line |= {} if seconds is None else {"duration_sec": round(seconds, 6)}
        line |= {"extra": extra, "workid": worker, "step": step, "role": role, "job": job, "run": "0a1b2c3d"}
        lines[role, worker, step].append((end, json.dumps(line)))

    for number, (start, _, end, _) in enumerate(ran.steps, 1):
        log("trainer", 0, number, end, "step", end - start, reward=0.5)
        if number in ran.waits:
            log("trainer", 0, number, end, "lease_wait", ran.waits[number], phase="train", nodes=["t0"], token=0)
    for it in ran.stays:
        group, sample = it.key
        who = {"request_id": f"{group.replace('@', 'x')}_{sample}", "turn": 1, "stay": 1, "replica": it.replica}
        who |= {"node": nodes[it.replica % len(nodes)]}
        told = {"prompt_tokens": PROMPT_TOKENS, "response_tokens": it.tokens, "version": it.step - 1, "held_sec": 0.0}
        seconds = it.end - it.start
        log("rollout", 0, it.step, it.start, "request_start", None, request_id=who["request_id"], session=0, validate=False)
        log("rollout", 0, it.step, it.end, "turn_engine_call", seconds, finish_reason="stop", queue_sec=0.0, **who, **told)
        times = {"queue_sec": 0.0, "prefill_sec": 0.0, "decode_sec": seconds, "retractions": 0, "cached_tokens": 0}
        log("server", it.replica, it.step, it.end, "engine_generate", seconds, finish="stop", priority=0, **who, **told, **times)
        whole = {"request_id": who["request_id"], "finish_reason": "stop", "turns": 1, "stays": 1, "validate": False}
        whole["batch_data_id"] = group.partition("@")[0]
        whole |= {"session": 0, "response_length": it.tokens, "parked_sec": 0.0, "score": 0.5}
        log("rollout", 0, it.step, it.end, "async_rollout_request_complete", seconds, **whole)
    for (role, worker, step), found in lines.items():
        path = directory / job / "events" / role / f"step_{step}" / f"worker_{worker}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(text + "\n" for _, text in sorted(found)))


@dataclass(frozen=True)
class Ranked:
    """Of one candidate: its keys, the change of a step's seconds as it is foretold, with its interval, and as it is."""

    keys: dict[str, str]
    foretold: float
    interval: tuple[float, float]
    true: float


def rank(rows: Sequence[LengthRow], bed: Bed = BED) -> list[Ranked]:
    """All candidates on these lengths."""
    recorded = recording(rows, seed=0)
    steps = int(TRAINED_PART * len(recorded.groups)) // bed.batch
    base = run(plain(recorded, bed), bed, steps)
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        write_log(base, directory)
        analysis = Analysis(read_files(directory, find_log_files(directory)))
        (found,) = recordings(analysis)
        model = WhatIf(found, stays_of(analysis, found.job))
    out = []
    for keys, whole in candidates(found.longest, found.recurs):
        it = model.predict(keys)
        true = run(whole(recorded, bed), bed, steps).step_s / base.step_s - 1
        out.append(Ranked(keys, it.change, it.interval, true))
    return out


def agreement(ranked: Sequence[Ranked]) -> dict[str, float]:
    """tau: Kendall's, of the foretold and the true order. lost: how much longer a step is under what was foretold as best than
    under what is best (0: the same key). error: the largest of a step's foretold seconds over its true ones, less 1. held: part
    of the true changes that lie within their intervals."""
    best, chosen = min(it.true for it in ranked), min(ranked, key=lambda it: it.foretold)
    return {
        "tau": float(kendalltau([it.foretold for it in ranked], [it.true for it in ranked]).statistic),
        "lost": (1 + chosen.true) / (1 + best) - 1,
        "error": max(abs((1 + it.foretold) / (1 + it.true) - 1) for it in ranked),
        "held": sum(it.interval[0] <= it.true <= it.interval[1] for it in ranked) / len(ranked),
    }
