"""Reduce events to small tables that merge: a run is read piece by piece, in any order, on any number of processes.

    events of a piece -> Tables, and Tables + Tables -> Tables with no row lost (asserted by the tests)

requests  a row a request: start, end, status, turns, tokens, seconds of each part
turns     a row a turn of a request: seconds of its parts, when its engine call ended
calls     a row a request and tool that it called: seconds of all its calls, how many, the end of the last
stays     a row a stay of a request in an engine, once as its caller and once as the engine's server saw it
totals    a row per job, role, step, worker and event: count, seconds, the longest, tokens
spans     a row per event that no request owns, with fields of `extra`: phases, leases, sync, sleep, wake, memory, ...

Several runs of one job in one directory become jobs of their own, `a (run 1)`, `a (run 2)`: while files are read a job's name
carries the mark of the run, which `told_apart` turns into a number. All times are seconds since the epoch. Runs in the report's
processes; called by run_log.py; pure.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Annotated, Any

import msgspec
import polars as pl

from verl_mux.profiling.eventlog import events

Int = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
Small = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Extra(msgspec.Struct, gc=False):
    request_id: str | Int | None = None
    turn: Small | float | None = None
    turns: Small | None = None
    generated_tokens: Int | None = None
    response_tokens: Int | None = None
    actual_response_tokens: Int | None = None
    response_length: Int | float | None = None
    validate: bool | None = None
    job: str | None = None
    phase: str | None = None
    pool: str | None = None
    nodes: list[str] | dict[str, Any] | None = None
    node: str | None = None
    tag: str | None = None
    side: str | None = None
    bytes: Int | float | None = None
    version: Int | None = None
    running: Int | float | None = None
    queued: Int | float | None = None
    token_usage: float | None = None
    tokens_per_sec: float | None = None
    prefill_tokens_per_sec: float | None = None
    mode: str | None = None
    node_bytes: Int | None = None
    reward: float | None = None
    stay: Small | None = None
    replica: Small | None = None
    queue_sec: float | None = None
    prefill_sec: float | None = None
    decode_sec: float | None = None
    held_sec: float | None = None
    parked_sec: float | None = None
    finish: str | None = None
    finish_reason: str | None = None
    retractions: Small | None = None
    retracted: Small | None = None
    requests: Int | None = None
    tool: str | None = None
    score: float | None = None
    batch_data_id: str | Int | None = None
    prompt_tokens: Count | None = None
    cached_tokens: Count | None = None
    keys: list[str] | None = None
    total_requests: Count | None = None
    target_completion: Count | None = None
    path: str | None = None
    reason: str | None = None
    error: str | None = None
    host: str | None = None

    @property
    def request_name(self) -> str | None:
        return None if self.request_id is None else str(self.request_id)

    @property
    def tokens(self) -> float | None:
        """The first of its names that is there."""
        for tokens in (self.generated_tokens, self.response_tokens, self.actual_response_tokens):
            if tokens is not None:
                return tokens
        return self.response_length

    @property
    def node_names(self) -> list[str] | None:
        """A job registers with its nodes by pool, which no span needs."""
        return self.nodes if isinstance(self.nodes, list) else None

    @property
    def prompt_id(self) -> str | None:
        """Of the data set's row; a data set without an index has none."""
        return None if self.batch_data_id in (None, "None") else str(self.batch_data_id)


class Line(msgspec.Struct, gc=False):
    timestamp: str
    event: str
    duration_sec: float | None = None
    extra: Extra | None = None
    workid: Count | None = None
    step: Count | None = None
    role: str | None = None
    job: str | None = None
    run: str | None = None
    request_id: str | Int | None = None  # the sglang logger lets callers put further keys at the top
    turn: Small | float | None = None


NO_EXTRA = Extra()

REQUEST_KEY = ["job", "step", "worker", "request_id"]
TOTAL_KEY = ["job", "role", "step", "worker", "event", "of_request"]
PARTS = list(dict.fromkeys(events.REQUEST_PARTS.values()))
_TIMES = ["turn", "stay", "start", "end", "seconds", "tokens"]
TURN_PARTS = ["engine", "preprocess", "tool_parse", "tool", "tool_response", "interaction", "postprocess"]


def _columns(kind: Any, *names: str, **renamed: str) -> dict[str, tuple[Any, str]]:
    return {name: (kind, name) for name in names} | {name: (kind, field) for name, field in renamed.items()}


# Columns read from extra: column -> (type, field of Extra).
SPAN_EXTRA = {
    **_columns(pl.String, "phase", "pool", "node", "tag", "side", "mode", "path", "reason", "host", of_job="job"),
    **_columns(pl.Float64, "bytes", "node_bytes", "running", "queued", "token_usage", "tokens_per_sec", "prefill_tokens_per_sec"),
    **_columns(pl.Float64, "reward"),
    **_columns(pl.Int64, "version", "replica", "requests", "retracted", launched="total_requests", wanted="target_completion"),
    **_columns(pl.List(pl.String), "keys", nodes="node_names"),
}
STAY_EXTRA = {
    **_columns(pl.Float64, queue="queue_sec", held="held_sec", prefill="prefill_sec", decode="decode_sec"),
    **_columns(pl.Int64, "replica", "retractions", "version", prompt="prompt_tokens", cached="cached_tokens"),
    **_columns(pl.String, "node", "finish", "finish_reason"),
}


def _merged(**columns: str) -> dict[str, pl.Expr]:
    """How rows of one key become one: method of an expression -> names of columns."""
    return {name: getattr(pl.col(name), method)() for method, names in columns.items() for name in names.split()}


REQUEST_MERGE = _merged(
    min="start at_work",
    sum=" ".join(["parked stays engine_tokens engine_calls", *PARTS]),
    max="last last_event completed aborted seconds turns final_tokens reward_end score prompt_id failed",
    any="validate",
)
CALL_MERGE = _merged(max="end", sum="seconds calls")
TURN_MERGE = _merged(max="engine_end", sum=" ".join(["turn_tokens", *TURN_PARTS]))
_TOTAL_MERGE = _merged(sum="count seconds tokens", max="longest last", min="first")


@dataclass
class Tables:
    """See the module."""

    requests: pl.DataFrame
    turns: pl.DataFrame
    calls: pl.DataFrame
    totals: pl.DataFrame
    spans: pl.DataFrame
    stays: pl.DataFrame

    @classmethod
    def merge(cls, parts: list[Tables]) -> Tables:
        """One set of tables from several of the same run."""
        return cls(
            _merge([part.requests for part in parts], REQUEST_KEY, REQUEST_MERGE),
            _merge([part.turns for part in parts], [*REQUEST_KEY, "turn"], TURN_MERGE),
            _merge([part.calls for part in parts], [*REQUEST_KEY, "tool"], CALL_MERGE),
            _merge([part.totals for part in parts], TOTAL_KEY, _TOTAL_MERGE),
            pl.concat([part.spans for part in parts]),
            pl.concat([part.stays for part in parts]),
        )


def _merge(frames: list[pl.DataFrame], key: list[str], columns: dict[str, pl.Expr]) -> pl.DataFrame:
    whole = pl.concat(frames)
    return whole.group_by(key).agg(**columns).select(whole.columns) if len(frames) > 1 else whole


def reduce_events(frame: pl.DataFrame, lines: list[Line]) -> Tables:
    """`frame` as run_log.py makes it from `lines`."""
    frame = frame.with_columns(
        pl.col("event").replace(events.ALIASES), (pl.col("end") - pl.col("seconds").fill_null(0.0)).alias("start")
    )
    owned = frame.filter(pl.col("request_id").is_not_null() & (pl.col("role") != "server"))
    owned = owned.with_columns(pl.col("event").replace_strict(events.REQUEST_PARTS, default=None).alias("part"))
    stays = _stays(frame, lines)
    return Tables(_requests(owned, lines), _turns(owned), _calls(owned, lines), _totals(frame), _spans(frame, lines), stays)


def _of(column: str, part: str) -> pl.Expr:
    return pl.col(column).filter(pl.col("part") == part)


def _with_extra(frame: pl.DataFrame, lines: list[Line], columns: dict[str, tuple[Any, str]]) -> pl.DataFrame:
    """The frame with these columns of its lines' `extra`."""
    extras = [lines[index].extra or NO_EXTRA for index in frame["line"]]
    return frame.with_columns(
        pl.Series(name, list(map(attrgetter(key), extras)), kind) for name, (kind, key) in columns.items()
    ).drop("line")


def _requests(owned: pl.DataFrame, lines: list[Line]) -> pl.DataFrame:
    ends = owned.filter(pl.col("event") == events.REQUEST_COMPLETE).select(*REQUEST_KEY, "line")
    named = _with_extra(ends, lines, _columns(pl.Float64, "score") | _columns(pl.String, "prompt_id"))
    values = named.group_by(REQUEST_KEY).agg(pl.col("score", "prompt_id").max())
    cut = owned.filter(pl.col("event") == events.REQUEST_ABORTED).select(*REQUEST_KEY, "line")
    failed = _with_extra(cut, lines, _columns(pl.String, "reason", failed="error")).filter(pl.col("reason") == "failed")
    why = failed.group_by(REQUEST_KEY).agg(pl.col("failed").fill_null("its error was not logged").max())
    both = _reduced(owned).join(values, on=REQUEST_KEY, how="left", nulls_equal=True)
    return both.join(why, on=REQUEST_KEY, how="left", nulls_equal=True)


def _reduced(owned: pl.DataFrame) -> pl.DataFrame:
    complete = pl.col("event") == events.REQUEST_COMPLETE
    aborted = pl.col("event") == events.REQUEST_ABORTED
    padded = pl.col("event") == events.REQUEST_PADDED
    return owned.group_by(REQUEST_KEY).agg(
        start=pl.col("start").min(),
        at_work=pl.col("start").filter(~pl.col("event").is_in(events.REACHING_BACK)).min(),
        parked=pl.col("seconds").filter(pl.col("event") == events.REQUEST_PARKED).sum(),
        stays=pl.col("stay").is_not_null().sum(),
        last=pl.col("end").max(),
        # With its time before it, so that of two pieces of a run the later is the larger.
        last_event=pl.concat_str(
            (pl.col("end") * 1e6).cast(pl.Int64).cast(pl.String).str.zfill(20), "event", separator=" "
        ).max(),
        completed=pl.col("end").filter(complete).max(),
        aborted=pl.col("end").filter(aborted | padded).max(),
        seconds=pl.col("seconds").filter(complete | aborted).max(),
        turns=pl.col("turns").max(),
        final_tokens=pl.col("tokens").filter(complete).max(),
        engine_tokens=_of("tokens", "engine").sum(),
        validate=pl.col("validate").fill_null(False).any(),
        reward_end=_of("end", "reward").max(),
        engine_calls=(pl.col("part") == "engine").sum(),
        **{part: _of("seconds", part).sum() for part in PARTS},
    )


def _turns(owned: pl.DataFrame) -> pl.DataFrame:
    return (
        owned.filter(pl.col("part").is_in(TURN_PARTS))
        .with_columns(pl.coalesce("turn", "end"))  # a call that names no turn is a turn of its own, in order of time
        .group_by([*REQUEST_KEY, "turn"])
        .agg(
            engine_end=_of("end", "engine").max(),
            turn_tokens=_of("tokens", "engine").sum(),
            **{part: _of("seconds", part).sum() for part in TURN_PARTS},
        )
    )


def _calls(owned: pl.DataFrame, lines: list[Line]) -> pl.DataFrame:
    named = _with_extra(owned.filter(pl.col("part") == "tool"), lines, _columns(pl.String, "tool"))
    return named.group_by([*REQUEST_KEY, "tool"]).agg(pl.col("end").max(), pl.col("seconds").sum(), calls=pl.len().cast(pl.Int64))


def _stays(frame: pl.DataFrame, lines: list[Line]) -> pl.DataFrame:
    """`seen_by`: "rollout", "server", or "queue": a wait that its stay does not count. `tokens`: generated in the stay."""
    served = pl.col("event") == events.ENGINE_GENERATE
    called = (pl.col("event") == events.TURN_ENGINE_CALL) & (pl.col("role") != "server")
    waited = pl.col("event") == events.ENGINE_QUEUE
    seen_by = pl.when(served).then(pl.lit("server")).when(called).then(pl.lit("rollout")).otherwise(pl.lit("queue"))
    nameless = pl.when(served).then(pl.format("? {} {}", "worker", "end"))  # a server that logs no names of requests
    found = frame.filter(called | served | waited).with_columns(
        pl.coalesce("request_id", nameless).alias("request_id"), seen_by.alias("seen_by")
    ).filter(pl.col("request_id").is_not_null())  # fmt: skip
    kept = _with_extra(found.select(*REQUEST_KEY, "seen_by", *_TIMES, "line"), lines, STAY_EXTRA)
    queues = kept.filter(seen_by="server")["queue"]
    own = (pl.col("seen_by") != "queue") | (queues.len() == 0 or queues.null_count() > 0)
    return kept.filter(own & ((pl.col("seen_by") != "rollout") | pl.col("replica").is_not_null() | pl.col("stay").is_not_null()))


def _totals(frame: pl.DataFrame) -> pl.DataFrame:
    return (
        frame.with_columns(pl.col("request_id").is_not_null().alias("of_request"))
        .group_by(TOTAL_KEY)
        .agg(
            count=pl.len().cast(pl.Int64),
            seconds=pl.col("seconds").sum(),
            longest=pl.col("seconds").max(),
            tokens=pl.col("tokens").sum(),
            first=pl.col("start").min(),
            last=pl.col("end").max(),
        )
    )


def _spans(frame: pl.DataFrame, lines: list[Line]) -> pl.DataFrame:
    known = pl.col("event").is_in(list(events.NAMES)) | (pl.col("role") != "rollout")
    free = frame.filter(pl.col("request_id").is_null() & known)
    kept = free.select("job", "role", "step", "worker", "event", "start", "end", "seconds", "tokens", "line")
    return _with_extra(kept, lines, SPAN_EXTRA)


_MARK = "\x1f"


def marked(job: str, run: str) -> pl.Expr:
    """The column `job` with the mark of the column `run`, where a line names one."""
    return pl.when(pl.col(run).is_null()).then(pl.col(job)).otherwise(pl.concat_str(job, run, separator=_MARK)).alias(job)


def told_apart(tables: Tables) -> Tables:
    """The same tables, every job under the name that people read."""
    runs: dict[str, list[tuple[float, str]]] = {}  # job -> when each of its runs began, and the marked name
    for label, first in tables.totals.group_by("job").agg(pl.col("first").min()).sort("first").rows():
        runs.setdefault(label.partition(_MARK)[0], []).append((first, label))
    numbered = {
        job: [f"{job} (run {n})".lstrip() for n, _ in enumerate(began, 1)] if len(began) > 1 else [job]
        for job, began in runs.items()
    }
    names = {label: name for job, began in runs.items() for (_, label), name in zip(began, numbered[job], strict=True)}
    frames = {field.name: getattr(tables, field.name) for field in fields(tables)}
    renamed = {key: frame.with_columns(pl.col("job").replace(names)) for key, frame in frames.items()}

    def run_at(job: str | None, end: float) -> str | None:
        """What the coordinator says of a job belongs to the run that had begun last."""
        if job not in runs:
            return job
        return numbered[job][max(bisect.bisect_right(runs[job], end, key=lambda run: run[0]) - 1, 0)]

    of_job = [run_at(job, end) for job, end in renamed["spans"].select("of_job", "end").iter_rows()]
    renamed["spans"] = renamed["spans"].with_columns(pl.Series("of_job", of_job, pl.String))
    return replace(tables, **renamed)


# The parts a request's time divides into, in the order of its life; `other` is what no event accounts for.
SHOWN_PARTS = [
    "pending", "preprocess", "engine", "postprocess", "tool_parse",
    "tool", "tool_response", "interaction", "reward", "finalize", "other",
]  # fmt: skip


def make_requests(tables: Tables, turns: pl.DataFrame) -> pl.DataFrame:
    """A row a request, in order of its end: REQUEST_KEY, start, end, seconds, status, turns, stays, tokens, score, parts, ...

    Where stays are logged, `start` is when it began to run, in the step in which it ended, and `seconds` leaves out the time in
    which it was parked. status: "complete", "aborted", or "open" (its end was never logged; `end` is then its last event).
    Where a job logs no ends at all, the last event counts as the end. `turns` is what `make_turns` made of the same tables.
    """
    raw = tables.requests.with_columns(pl.col("completed").is_not_null().any().over("job").alias("ends_logged"))
    complete = pl.col("completed").is_not_null() | ~pl.col("ends_logged") & pl.col("aborted").is_null()
    status = pl.when(complete).then(pl.lit("complete")).when(pl.col("aborted").is_not_null()).then(pl.lit("aborted"))
    frame = raw.with_columns(
        status.otherwise(pl.lit("open")).alias("status"),
        pl.coalesce("completed", "aborted", "last").alias("end"),
        pl.coalesce("final_tokens", pl.col("engine_tokens").replace(0, None)).alias("tokens"),
        pl.when(pl.col("engine_calls") > 0).then("engine").otherwise("engine_inner").alias("engine"),
        (pl.col("postprocess") - pl.col("tool_parse")).clip(0.0).alias("postprocess"),
        # Our own finalization holds the reward; that of others follows it.
        pl.when(pl.col("stays") > 0)
        .then((pl.col("finalize") - pl.col("reward")).clip(0.0))
        .otherwise("finalize")
        .alias("finalize"),
        _turn_count(tables, turns).alias("turns"),
    )
    own = ((pl.col("stays") > 0) | (pl.col("parked") > 0)) & pl.col("at_work").is_not_null()
    frame = frame.with_columns(
        pl.when(own).then((pl.coalesce("seconds", pl.col("end") - pl.col("start")) - pl.col("parked")).clip(0.0)).otherwise(
            pl.coalesce("seconds", pl.col("end") - pl.col("start"))
        ).alias("seconds"),
        pl.when(own).then("at_work").otherwise("start").alias("start"),
    )  # fmt: skip
    accounted = pl.sum_horizontal(part for part in SHOWN_PARTS if part != "other")
    times, figures = ["start", "end", "seconds", "reward_end"], ["tokens", "score", "prompt_id", "failed", "last_event"]
    return (
        frame.with_columns((pl.col("seconds") - accounted).clip(0.0).alias("other"))
        .select(*REQUEST_KEY, *times, "status", "turns", "stays", *figures, "parked", "validate", *SHOWN_PARTS)
        .sort("end", *REQUEST_KEY)
    )


def _turn_count(tables: Tables, turns: pl.DataFrame) -> pl.Expr:
    counted = turns.group_by(REQUEST_KEY).agg(pl.col("turn").max().alias("turns"))
    found = tables.requests.select(REQUEST_KEY).join(counted, on=REQUEST_KEY, how="left", maintain_order="left")
    return pl.coalesce("turns", pl.lit(found["turns"]))


def make_turns(tables: Tables) -> pl.DataFrame:
    """A row a turn that called the engine: REQUEST_KEY, turn (1 is the first), engine (seconds), end, tokens."""
    called = tables.turns.filter(pl.col("engine_end").is_not_null()).sort(*REQUEST_KEY, "turn", maintain_order=True)
    return called.select(
        *REQUEST_KEY,
        _place_in_request().alias("turn"),
        "engine",
        pl.col("engine_end").alias("end"),
        pl.col("turn_tokens").replace(0, None).alias("tokens"),
    )


def _place_in_request() -> pl.Expr:
    """1, 2, ... within each request, of rows sorted by request: far cheaper than a window over millions of names."""
    row = pl.int_range(pl.len())
    first = pl.any_horizontal(pl.col(key).ne_missing(pl.col(key).shift()) for key in REQUEST_KEY)
    return row - pl.when(first | (row == 0)).then(row).forward_fill() + 1


STAY_KEY = ["job", "step", "request_id", "stay"]  # a sample that begins again in a later step counts its stays anew
_FIGURES = ["replica", "node", "queue", "held", "prefill", "decode", "retractions", "version", "prompt", "cached"]


def make_stays(tables: Tables) -> pl.DataFrame:
    """A row a stay, in order of its end: STAY_KEY, worker (the agent loop's, null if only the server logged it), turn,
    start, end, seconds, tokens, cut (it was no end of its turn), way (seconds that its caller waited beyond its server's),
    _FIGURES; null where neither side says so.

    Times are the engine's where its server logged the stay, else its caller's.
    """
    both = numbered_stays(tables.stays).with_columns(
        pl.when(pl.col("seen_by") == "rollout").then("worker").alias("worker"),
        (pl.coalesce("finish_reason", "finish") == "abort").alias("cut"),
        pl.coalesce("replica", pl.when(pl.col("seen_by") != "rollout").then("worker")).alias("replica"),
    )
    first = [pl.col(name).drop_nulls().first() for name in ("worker", *_FIGURES)]
    times = [pl.col(name).first() for name in ("turn", "start", "end", "seconds", "tokens")]
    waits = pl.col("seconds").filter(pl.col("seen_by") == "queue")
    waited = pl.when(waits.len() > 0).then(waits.sum()).alias("waited")
    called = pl.col("seconds").filter(pl.col("seen_by") == "rollout").first()
    way = called - pl.col("seconds").filter(pl.col("seen_by") == "server").first()
    # Sorted so below that the engine's own times stand first, then the caller's.
    stays = both.sort("seen_by", descending=True).group_by(STAY_KEY, maintain_order=True).agg(
        *times, *first, pl.col("cut").any(), waited, way.alias("way"), pl.col("seen_by").first()
    ).filter(pl.col("seen_by") != "queue")  # fmt: skip
    return stays.with_columns(pl.coalesce("queue", "waited").alias("queue")).drop("waited", "seen_by").sort("end", *STAY_KEY)


UNNUMBERED = 0.01  # of a job's stays: then none of its numbers is believed


def numbered_stays(stays: pl.DataFrame) -> pl.DataFrame:
    """Jobs that do not number their stays: a stay is then a turn, or a part of one, in order of time."""
    unknown = pl.col("stay").is_null() & (pl.col("seen_by") != "queue")
    if stays.filter(unknown).is_empty():
        return stays.filter(pl.col("stay").is_not_null())
    stays = stays.with_columns((unknown.mean() > UNNUMBERED).over("job").alias("by_turn")).filter(
        pl.col("by_turn") | pl.col("stay").is_not_null()
    )
    side, turn = ["job", "step", "request_id", "seen_by", "turn"], pl.col("turn").fill_null(0).cast(pl.Int64)
    part = pl.when(pl.col("seen_by") == "queue").then(1).otherwise(pl.col("end").rank("ordinal").over(side))
    return stays.with_columns(pl.when("by_turn").then(1000 * turn + part).otherwise("stay").cast(pl.Int64).alias("stay"))


def over_steps(tables: Tables) -> Tables:
    """The same tables; a request that ran in several steps belongs, with its turns, to the step in which it ended.

    In logs without stays a name may come again in another step, for another request: one request has one end, in its last step,
    or is cut off in all. Where its parked time is not logged, it is the time between its steps.
    """
    completed, cut = pl.col("completed").is_not_null(), pl.col("aborted").is_not_null()
    of_one = (completed.sum() == 1) & completed.sort_by("step").last() | ~completed.any() & cut.all()
    spread = tables.requests.group_by("job", "request_id").agg(
        pl.len().alias("steps"), pl.col("step").max().alias("last_step"),
        pl.col("worker").sort_by("step").last().alias("last_worker"),
        ((pl.col("stays") > 0).any() | of_one).alias("one"),
    ).filter((pl.col("steps") > 1) & pl.col("one")).drop("steps", "one")  # fmt: skip
    if spread.is_empty():
        return tables
    requests = _moved(tables.requests.with_columns(pl.col("step").alias("of_step")), spread)
    # A request counts for its last step from when it went on there.
    last_start = pl.col("at_work").filter(pl.col("of_step") == pl.col("step")).min()
    between = (pl.col("at_work") - pl.col("last").shift()).clip(0.0).sum()
    reaches_back = pl.col("completed").max() - pl.col("seconds").max() < last_start - 1.0
    parked = pl.when((pl.col("parked").sum() == 0) & reaches_back).then(between).otherwise(pl.col("parked").sum())
    merged = REQUEST_MERGE | {"at_work": last_start, "parked": parked}
    whole = requests.sort("of_step").group_by(REQUEST_KEY, maintain_order=True).agg(**merged).select(tables.requests.columns)
    turns = _moved(tables.turns, spread).group_by([*REQUEST_KEY, "turn"]).agg(**TURN_MERGE)
    return replace(tables, requests=whole, turns=turns.select(tables.turns.columns))


def _moved(frame: pl.DataFrame, spread: pl.DataFrame) -> pl.DataFrame:
    """Rows of requests that ran in several steps, under their last step and its worker."""
    joined = frame.join(spread, on=["job", "request_id"], how="left", maintain_order="left")
    return joined.with_columns(
        pl.coalesce("last_step", "step").alias("step"), pl.coalesce("last_worker", "worker").alias("worker")
    ).drop("last_step", "last_worker")
