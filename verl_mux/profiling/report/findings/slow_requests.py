"""Findings about single requests that took far longer than their peers, by what their time went into: `slow_turn`,
`slow_part`, `slow_request`, and single requests of `tool_wait`, `reward_wait`, `preprocessing` and `long_tail`. Runs in the
report; called by output/summary.py; pure.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import polars as pl

from verl_mux.profiling.plain.lines import overlap
from verl_mux.profiling.report.findings.finding import MIN_SAMPLE, Finding, Gap, Place, expected_seconds, isolated
from verl_mux.profiling.report.findings.waits import LEAST_S, QUEUED
from verl_mux.profiling.report.input.reduction import REQUEST_KEY, SHOWN_PARTS
from verl_mux.profiling.report.measures.analysis import UNIT, Analysis

COST = 0.10  # of a step's usual length; a request that lost less is not worth a finding
COST_SHARED = 0.25  # the same where SHARED or more were slow together: a hiccup of their process that all outlived is none
MOST = 5  # of each kind and job
SHARED = 3  # this many requests slowed alike by one gap count as the gap
MANY = 10
BLAME = 0.5  # of what a request lost, in one part of it
MIN_ANSWERS = 128  # of a job: fewer do not tell how long its answers may be
MIN_LOCAL = 8  # requests of one place (a replica's or worker's step) that tell its usual speed

TEXT = {
    "slow_turn": "turn {turn} of {request_id} spent {seconds:.1f} s in the engine, {expected:.1f} s would be usual",
    "reward_wait": "the reward of {request_id} took {seconds:.1f} s, {expected:.2g} s would be usual",
    "tool_wait": "tool calls of {request_id} took {seconds:.1f} s, {expected:.2g} s would be usual",
    "preprocessing": "preparing the turns of {request_id} took {seconds:.1f} s, {expected:.2g} s would be usual",
    "slow_part": "{part} of {request_id} took {seconds:.1f} s, {expected:.2g} s would be usual",
    "long_tail": "{request_id} took {seconds:.1f} s for {tokens} tokens, {usual_tokens:.0f} would be usual; its step waited",
    "slow_request": "{request_id} took {seconds:.1f} s, {expected:.1f} s would be usual, and no event says on what",
}
ADVICE = {
    "slow_turn": "compare the engine's log at that time: queueing, retracted requests, a cold prefix cache, a stall; "
    "cap a turn's new tokens, and abort and requeue what is past a deadline",
    "reward_wait": "give the reward function a timeout, run it in a process of its own (it may hold the interpreter), "
    "and hand it only the part of the response that it reads",
    "tool_wait": "give tool calls a timeout and bound how many run at once",
    "preprocessing": "see what the agent loop's worker does before a turn: templates, images, a full event loop",
    "slow_part": "see what the agent loop's worker does there, and whether another request holds its event loop",
    "long_tail": "lower the maximum response length, over-sample and requeue the last prompt groups, or segment answers",
    "slow_request": "log the parts of a request (turns, tools, reward) to see which one it is",
}
# Of the parts that a request's time divides into: the finding of each that is not usual.
KIND_OF_PART = {"tool": "tool_wait", "reward": "reward_wait", "preprocess": "preprocessing", "pending": "preprocessing"}


Parts = dict[str, pl.DataFrame]  # kind of finding -> the rows it looks for: REQUEST_KEY, unit, turn, seconds, end, tokens


def find(analysis: Analysis, gaps: dict[Place, Gap], starved: Collection[Place] = ()) -> list[Finding]:
    """At most MOST of each kind and job, the slowest. `gaps`: the stalls, whose time is subtracted from the requests that sat
    through them.

    Slow turns on engines short of KV cache (`starved`) are that finding's, as the wait in a queue is where all wait in it.
    """
    # The usual step of each job: the median over steps and workers of the time all requests take.
    typical = dict(analysis.by_worker.group_by("job").agg(pl.col("total").median()).iter_rows())
    queues = {*starved, *(place for place, queued in analysis.engines.queue_parts.items() if queued >= QUEUED)}
    parts = {kind: _without_gaps(rows, gaps) for kind, rows in _parts(analysis, gaps, queues).items()}
    found = [
        (step := typical.get(job, 0.0), _slow(kind, rows, max(COST * step, LEAST_S)))
        for kind, of_all in parts.items()
        for (job,), rows in of_all.group_by("job", maintain_order=True)
    ]
    early = _not_awaited([finding for _, slow in found for finding in slow], analysis.finished)
    findings: list[Finding] = []
    for step, slow in found:
        findings += _together([f for f in slow if _key(f) not in early], COST_SHARED * step)[:MOST]
    explained = {_key(f) for f in findings if f.kind != "slow_request"}
    accounts = _Accounts(analysis)
    blamed = [
        accounts.blame(f, parts["slow_turn"]) if f.kind == "slow_request" else f
        for f in findings
        if f.kind != "slow_request" or _key(f) not in explained
    ]
    blamed = [f for f in blamed if f.job not in analysis.engines.jobs or not _is_its_engines(f, gaps, starved)]
    with_names = [accounts.name(f) for f in blamed + _long_answers(analysis, typical, explained)]
    return [replace(f, **{"replica": None, **analysis.engines.where(f.job, f.replica)}) for f in _by_prompt(with_names)]


def _by_prompt(found: list[Finding]) -> list[Finding]:
    """Requests of one prompt and step that were slow in one thing share the finding of the slowest."""
    groups: dict[tuple, list[Finding]] = {}
    for finding in found:
        same = (finding.kind, finding.job, finding.step, finding.evidence["prompt"], finding.evidence.get("tool"))
        groups.setdefault(same, []).append(finding)
    return [
        worst if len(group) == 1 else replace(
            worst, text=f"{worst.text}; {len(group) - 1} more of its prompt",
            evidence=worst.evidence | {"request_ids": [f.request_id for f in group][:20]},
        )
        for group in groups.values() for worst in (max(group, key=lambda f: f.cost_s),)
    ]  # fmt: skip


class _Accounts:
    """What each request's time went into, by the events it has, beside what is usual in its job: 0 for what most have not."""

    def __init__(self, analysis: Analysis) -> None:
        self.finished = analysis.finished
        self.calls = analysis.tables.calls
        self.parts = [part for part in SHOWN_PARTS if part != "engine"]
        usual = analysis.finished.group_by("job").agg(pl.col(self.parts).median())
        self.usual = {row["job"]: row for row in usual.iter_rows(named=True)}

    def _row(self, finding: Finding) -> dict:
        return self.finished.filter(job=finding.job, step=finding.step, worker=finding.worker, request_id=finding.request_id).row(
            0, named=True
        )

    def blame(self, whole: Finding, turns: pl.DataFrame) -> Finding:
        """A slow request whose time went into one of its parts is a finding of that part, though not slow enough by itself, or
        though few others have such a part at all."""
        row, usual = self._row(whole), self.usual[whole.job]
        part = max(self.parts, key=lambda part: (row[part] or 0.0) - (usual[part] or 0.0))
        spent, expected = row[part] or 0.0, usual[part] or 0.0
        if part != "other" and spent - expected >= BLAME * whole.cost_s:
            kind = KIND_OF_PART.get(part, "slow_part")
            times = {"end": row["reward_end"] if part == "reward" else row["end"], "logged": spent, "seconds": spent}
            return _finding(kind, row | times | {"turn": None, "part": part.replace("_", " ")}, expected)
        rows = turns.filter(pl.col("job") == whole.job)
        if rows.is_empty():
            return whole
        own = rows.with_columns(pl.Series("expected", _expected(rows))).filter(request_id=whole.request_id)
        for turn in own.sort("seconds", descending=True).head(1).iter_rows(named=True):
            if turn["seconds"] - turn["expected"] >= BLAME * whole.cost_s:
                return _finding("slow_turn", turn | {"worker": whole.worker}, turn["expected"])
        return whole

    def name(self, finding: Finding) -> Finding:
        """With the prompt's name, and the tool's."""
        evidence = finding.evidence | {"prompt": (finding.request_id or "").rpartition("_")[0] or finding.request_id}
        own = self.calls.filter(job=finding.job, request_id=finding.request_id).sort("seconds").drop_nulls("tool")
        if finding.kind != "tool_wait" or own.is_empty():
            return replace(finding, evidence=evidence)
        tool = own["tool"][-1]
        return replace(finding, text=f"{finding.text} (tool {tool})", evidence=evidence | {"tool": tool})


def _long_answers(analysis: Analysis, typical: dict[str, float], explained: set[tuple]) -> list[Finding]:
    """Answers far longer than the run's others, single ones and all of a prompt, for each of which its step waited for a quarter
    of its time or more."""
    found = []
    known = analysis.finished.filter((pl.col("tokens") > 0) & ~pl.col("job").is_in(list(analysis.unawaited)))
    known = known.sort("end").with_columns(pl.col("request_id").str.replace(r"_[^_]*$", "").alias("prompt"))
    for (job,), rows in known.group_by("job", maintain_order=True):
        for unit, least in (("request_id", 1), ("prompt", 2)) if rows.height >= MIN_ANSWERS else ():
            same = ("step", unit)
            middle, answers = pl.col("tokens").median().over(same).alias("middle"), pl.len().over(same).alias("answers")
            each = rows.with_columns(middle, answers).filter(pl.col("answers") >= least)
            each = each.unique(same, keep="last", maintain_order=True)
            if each.is_empty():
                continue
            usual = float(each["middle"].median())
            ends = dict(each.group_by("step").agg(pl.col("end").sort().slice(-2, 1).first()).iter_rows())
            for index in isolated(each["middle"].to_numpy() / usual):
                row = each.row(int(index), named=True)
                late = row["end"] - (ends[row["step"]] or row["end"])
                if late >= max(COST_SHARED * typical.get(job, 0.0), LEAST_S) and _key_of(row) not in explained:
                    explained = {*explained, _key_of(row)}
                    seen = {"turn": None, "logged": row["seconds"], "usual_tokens": usual}
                    of_all = f"; all {row['answers']} answers of its prompt are long" if row["answers"] > 1 and least > 1 else ""
                    finding = _finding("long_tail", row | seen, row["seconds"] - late)
                    found.append(replace(finding, cost_s=late, text=finding.text + of_all))
    return found[:MOST]


def _key_of(row: dict) -> tuple:
    return tuple(row[name] for name in REQUEST_KEY)


def _key(finding: Finding) -> tuple:
    return tuple(getattr(finding, name) for name in REQUEST_KEY)


def _not_awaited(slow: list[Finding], finished: pl.DataFrame) -> set[tuple]:
    """REQUEST_KEY of those that their step did not wait for: without what all of these lost, it would have lasted as long.

    Of steps in one round: where requests were parked, a round may have waited for one, and all after it.
    """
    lost: dict[tuple, float] = {}
    for finding in slow:
        lost[_key(finding)] = max(lost.get(_key(finding), 0.0), finding.cost_s)
    schema = {name: finished.schema[name] for name in REQUEST_KEY} | {"lost": pl.Float64}
    losses = pl.DataFrame([(*key, seconds) for key, seconds in lost.items()], schema, orient="row")
    sooner = finished.join(losses, on=REQUEST_KEY, how="left").with_columns(
        (pl.col("end") - pl.col("lost").fill_null(0.0)).max().over("job", "step").alias("over")
    )
    one_round = pl.col("parked").fill_null(0.0).sum().over("job", "step") == 0
    return set(sooner.filter(one_round & (pl.col("end") <= pl.col("over"))).select(REQUEST_KEY).rows())


def _is_its_engines(turn: Finding, gaps: dict[Place, Gap], starved: Collection[Place]) -> bool:
    """Whether a slow turn sat in an engine that was short of KV cache or stood still."""
    if turn.kind != "slow_turn" or turn.replica is None or turn.step is None:
        return False
    place = (turn.job, turn.step, turn.replica)
    gap = gaps.get(place)
    if gap is None or turn.start is None or turn.end is None or place in starved:
        return place in starved
    return turn.request_id is not None and overlap((turn.start, turn.end), (gap.start, gap.end)) >= BLAME * gap.seconds


def _together(found: list[Finding], cost: float) -> list[Finding]:
    """Requests of one worker that were slow in one thing at one time share the finding of the slowest.

    Where SHARED or more of them lost less than `cost` seconds, it is none.
    """
    shared: list[tuple[Finding, list[str | None]]] = []
    for finding in found:
        names = next((names for first, names in shared if _same_time(first, finding)), None)
        if names is None:
            shared.append((finding, names := []))
        names.append(finding.request_id)
    kept = [(finding, names) for finding, names in shared if len(names) < SHARED or finding.cost_s >= cost]
    return [
        finding if len(names) == 1 else replace(
            finding, text=f"{finding.text}; {len(names) - 1} more at the same time",
            evidence=finding.evidence | {"request_ids": names[:20]},
        )
        for finding, names in kept
    ]  # fmt: skip


def _same_time(one: Finding, other: Finding) -> bool:
    if (one.step, one.worker) != (other.step, other.worker):
        return False
    if one.start is None or one.end is None or other.start is None or other.end is None:
        return False
    return overlap((one.start, one.end), (other.start, other.end)) >= 0.8 * other.seconds


def _parts(analysis: Analysis, gaps: dict[Place, Gap], queues: Collection[Place]) -> Parts:
    """Turns are those of finished requests; where the log knows engines, stays, each in its own step, without their time in a
    queue."""
    columns = [*REQUEST_KEY, "unit", "turn", "seconds", "end", "tokens"]
    done = _without_engines_faults(analysis, gaps, queues).with_columns(turn=pl.lit(None, pl.Int64))
    of_engines, awaited = pl.col("job").is_in(list(analysis.engines.jobs)), ~pl.col("job").is_in(list(analysis.unawaited))
    turns = analysis.turns.join(analysis.finished.select(REQUEST_KEY), on=REQUEST_KEY, how="semi").rename({"engine": "seconds"})
    turns = turns.filter(~of_engines & awaited).select(columns)
    stays = analysis.engines.stays.filter(pl.col("worker").is_not_null() & (pl.col("tokens") > 0)).drop("seconds")
    turns = pl.concat([turns, stays.rename({"work": "seconds"}).select(columns).cast(dict(turns.schema))])
    calls = done.with_columns(tokens=pl.lit(None, pl.Int64))
    rewards = calls.filter(pl.col("reward") > 0).with_columns(seconds="reward", end="reward_end")
    tools = calls.filter(pl.col("tool") > 0).with_columns(seconds="tool")
    named = {"slow_turn": turns, "reward_wait": rewards, "tool_wait": tools, "slow_request": done.filter(awaited)}
    return {kind: rows.select(columns) for kind, rows in named.items()}


def _without_engines_faults(analysis: Analysis, gaps: dict[Place, Gap], queues: Collection[Place]) -> pl.DataFrame:
    """Finished requests; where the log knows engines, without the time that stays of theirs sat in a gap, in whichever step, or
    waited at one of the `queues`."""
    stays = analysis.engines.stays
    if stays.is_empty() or not (gaps or queues):
        return analysis.finished
    shared = pl.min_horizontal("end", "to") - pl.max_horizontal("start", "from")
    stalled = stays.join(_spans(gaps), on=UNIT).select("job", "request_id", shared.clip(0.0).alias("lost"))
    places = pl.DataFrame(list(queues), {name: stays.schema[name] for name in UNIT}, orient="row")
    queued = stays.join(places, on=UNIT).select("job", "request_id", pl.col("queue").fill_null(0.0).alias("lost"))
    lost = pl.concat([stalled, queued]).group_by("job", "request_id").agg(pl.col("lost").sum())
    done = analysis.finished.join(lost, on=["job", "request_id"], how="left", maintain_order="left")
    return done.with_columns((pl.col("seconds") - pl.col("lost").fill_null(0.0)).clip(0.0)).drop("lost")


def _spans(gaps: dict[Place, Gap]) -> pl.DataFrame:
    return pl.DataFrame(
        [(*place, gap.start, gap.end) for place, gap in gaps.items()],
        schema={"job": pl.String, "step": pl.Int64, "unit": pl.Int64, "from": pl.Float64, "to": pl.Float64},
        orient="row",
    )


def _without_gaps(rows: pl.DataFrame, gaps: dict[Place, Gap]) -> pl.DataFrame:
    """Takes a gap's time off the rows that sat through it, where SHARED or more did so.

    Not off the only one that did so in a later turn while MANY others were in their first: that turn is its own story.
    """
    if not gaps:
        return rows.with_columns(pl.col("seconds").alias("logged"))
    shared = pl.min_horizontal("end", "to") - pl.max_horizontal(pl.col("end") - pl.col("seconds"), "from")
    rows = rows.join(_spans(gaps), on=UNIT, how="left").with_columns(shared=shared.clip(0.0).fill_null(0.0))
    rows = rows.with_columns(sat=(pl.col("shared") >= 0.5 * (pl.col("to") - pl.col("from"))).fill_null(False))
    later = pl.col("sat") & (pl.col("turn").fill_null(1) > 1)
    all_sat, all_later = pl.col("sat").sum().over(UNIT), later.sum().over(UNIT)
    known = (all_sat >= SHARED) & ~(later & (all_later == 1) & (all_sat > MANY))
    off = pl.when(known).then("shared").otherwise(0.0)
    return rows.with_columns(logged="seconds", seconds=(pl.col("seconds") - off).clip(0.0))


def _slow(kind: str, rows: pl.DataFrame, cost: float) -> list[Finding]:
    seconds = rows["seconds"].to_numpy()
    if len(seconds) < MIN_SAMPLE:
        return []
    expected = _expected(rows)
    found = [i for i in isolated(seconds / np.maximum(expected, 1e-9)) if seconds[i] - expected[i] >= cost]
    kept = [_finding(kind, rows.row(int(i), named=True), float(expected[i])) for i in found]
    return sorted(kept, key=lambda finding: -finding.seconds)


def _expected(rows: pl.DataFrame) -> np.ndarray:
    """By tokens where all rows know theirs, else by turn; then scaled to the speed of the row's worker and step."""
    seconds = rows["seconds"].to_numpy()
    if rows["tokens"].null_count() == 0:
        expected = expected_seconds(seconds, rows["tokens"].to_numpy().astype(float))
    else:
        counted = pl.len().over("turn") >= MIN_SAMPLE
        by_turn = pl.when(counted).then(pl.col("seconds").median().over("turn")).otherwise(pl.col("seconds").median())
        expected = rows.select(by_turn).to_series().to_numpy()
    ratio = pl.Series("ratio", seconds / np.maximum(expected, 1e-9))
    local = pl.when(pl.len().over(UNIT) >= MIN_LOCAL).then(pl.col("ratio").median().over(UNIT)).otherwise(1.0)
    return expected * rows.with_columns(ratio).select(local).to_series().to_numpy()


def _finding(kind: str, row: dict, expected: float) -> Finding:
    about = row | {"seconds": row["logged"], "expected": expected}
    evidence = {"expected_sec": round(expected, 6), "times_expected": round(row["seconds"] / max(expected, 1e-9), 1)}
    return Finding(
        kind, row["job"], row["step"], row["worker"], row["logged"], TEXT[kind].format(**about), ADVICE[kind],
        request_id=row["request_id"], turn=row["turn"], replica=row["unit"] if kind == "slow_turn" else None,
        cost_s=row["seconds"] - expected, evidence=evidence,
        start=None if row["end"] is None else row["end"] - row["logged"], end=row["end"],
    )  # fmt: skip
