"""The report as tables in a terminal, made of a summary. Called by report_command.py, which prints them; pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

MAX_ROWS = 12


def render(summary: dict[str, Any], directory: str) -> RenderableType:
    """The whole report: what was read, findings first, then where the time went."""
    return Group(*_blocks(summary, directory))


def _blocks(summary: dict[str, Any], directory: str) -> Iterator[RenderableType]:
    read = summary["input"]
    yield Text(
        f"{directory}: {_count(summary['steps'], 'step')}, {_count(summary['workers'], 'worker')}, "
        f"{_count(summary['requests'], 'request')}, {_count(read['events'], 'event')} in {_count(read['files'], 'file')}"
    )
    if summary["skipped_lines"]:
        yield Text(f"{summary['skipped_lines']} lines skipped: {_reasons(read['skipped'])}", style="yellow")
    if read["noticed"]:
        yield Text(f"noticed: {_reasons(read['noticed'])}", style="yellow")
    found = findings_table(summary["findings"]) if summary["input"]["events"] else Text("No events were read: nothing to judge.")
    yield Padding(found, (1, 0, 0, 0))
    nodes = summary["nodes"] if len(summary["nodes"]) > 1 else []
    engines = (_engines("Replicas", "replica", "nodes", summary["replicas"]), _engines("Nodes", "node", "replicas", nodes))
    before, after = (_jobs, _pools, _shares, _completion), (_workers, _turns, _slowest)
    for table in (*(make(summary) for make in before), *engines, *(make(summary) for make in after)):
        if table is not None:
            yield Padding(table, (1, 0, 0, 0))
    if read["missing"]:
        yield Padding(Group(Text("What this log does not tell", style="bold"), *map(_missing, read["missing"])), (1, 0, 0, 0))


def _missing(entry: dict[str, Any]) -> Text:
    of = f" (jobs {', '.join(entry['jobs'])})" if any(entry["jobs"]) else ""
    return Text(f"  {entry['what']}{of}: {entry['needs']} would tell; {entry['so']}.")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _reasons(counts: dict[str, int]) -> str:
    texts = [f"{reason} ({count})" for reason, count in list(counts.items())[:6]]
    return "; ".join(texts) + ("; ..." if len(counts) > 6 else "")


def findings_table(findings: list[dict[str, Any]]) -> RenderableType:
    """What cost most, with evidence and what to try."""
    if not findings:
        return Text("No findings: nothing stands out.", style="green")
    title = Text("Findings, what cost most first", style="bold")
    return Group(title, *(Padding(_finding(finding), (0, 0, 0, 2)) for finding in findings[:MAX_ROWS]))


def _finding(finding: dict[str, Any]) -> Text:
    head = f"{finding['kind'].replace('_', ' ')} ({_where(finding)}): "
    return Text.assemble((head, "bold yellow"), finding["text"], "\n  try: ", (finding["advice"], "dim"))


def _where(finding: dict[str, Any]) -> str:
    named = [(key, finding[key]) for key in ("job", "step", "node", "replica", "worker")]
    return " ".join(f"{name} {value}" for name, value in named if value not in (None, ""))


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table | None:
    """None without rows. The first column holds names from the log."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for name, *cells in rows:
        table.add_row(escape(name), *map(escape, cells))
    return table if table.row_count else None


def _number(form: str, value: float | None) -> str:
    return "" if value is None else form.format(value)


def _name(row: dict[str, Any], key: str) -> str:
    return f"{row['job']} {row[key]}".strip()


def _shares(summary: dict[str, Any]) -> Table | None:
    shares = list(summary["event_share"].items())[:MAX_ROWS]
    return _table("Share of the step", ("event", "%"), ((event, f"{percent:.2f}") for event, percent in shares))


def _completion(summary: dict[str, Any]) -> Table | None:
    figures, keys = summary["completion"], ("p50", "p80", "p95", "total", "t80_over_total")
    title = "Seconds until that part of a step's requests was done"
    rows = [(_name(row, "step"), *(f"{row[key]:.2f}" for key in keys)) for row in figures["per_step"][-MAX_ROWS:]]
    table = _table(title, ("step", "50 %", "80 %", "95 %", "all", "t80/all"), rows)
    if table is not None:
        table.add_row(f"mean of {len(figures['per_step'])}", *(f"{figures[key]:.2f}" for key in keys), style="bold")
    return table


def _workers(summary: dict[str, Any]) -> Table | None:
    """Workers side by side, those that were waited for first."""
    waits = sorted((wait, job, worker) for job, workers in summary["barrier_wait"].items() for worker, wait in workers.items())
    rows = []
    for wait, job, worker in waits[:MAX_ROWS] if len(waits) > 1 else ():
        steps = [r for r in summary["completion"]["per_worker"] if r["job"] == job and str(r["worker"]) == worker]
        means = [f"{sum(r[k] for r in steps) / len(steps):.2f}" if steps else "" for k in ("p80", "total")]
        rate = summary["engine"]["tokens_per_sec_by_worker"].get(job, {}).get(worker)
        rows.append((f"{job} {worker}".strip(), f"{wait:.2f}", *means, _number("{:.0f}", rate)))
    columns = ("worker", "waits at the barrier", "until 80 %", "until all", "tokens/s")
    return _table("Rollout workers, means over steps", columns, rows)


def _engines(title: str, by: str, other: str, found: list[dict[str, Any]]) -> Table | None:
    rows = [
        (
            _name(row, by), ", ".join(map(str, row[other])), str(row["stays"]), f"{row['tokens_per_sec'] or 0:.0f}",
            "" if row["seconds_per_token"] is None else f"{1000 * row['seconds_per_token']:.1f}",
            f"{100 * row['queue_part']:.1f} %", _number("{:.0%}", row["token_usage"]).replace("%", " %"), str(row["retractions"]),
        )
        for row in found[:MAX_ROWS]
    ]  # fmt: skip
    columns = ("stays", "tokens/s", "ms a token", "in the queue", "KV cache at most", "thrown out")
    return _table(title, (by, other, *columns), rows)


def _turns(summary: dict[str, Any]) -> Table | None:
    turns = summary["turns"]
    counts = turns["counts"] if len(turns["counts"]) > 1 or len(turns["engine_seconds"]) > 1 else {}
    rows = [
        (count, str(number), f"{100 * turns['share'][count]:.1f}", f"{turns['request_seconds'][count]:.2f}",
         _number("{:.2f}", turns["engine_seconds"].get(count)))
        for count, number in list(counts.items())[:MAX_ROWS]
    ]  # fmt: skip
    return _table("Turns", ("turns", "requests", "%", "seconds a request", "engine s in that turn"), rows)


def _slowest(summary: dict[str, Any]) -> Table | None:
    rows = []
    for row in summary["slowest_requests"][:5]:
        least = 0.05 * row["seconds"]
        parts = sorted((part for part in row["parts"].items() if part[1] >= least), key=lambda item: -item[1])[:3]
        where = ", ".join(f"{part} {seconds:.2f}" for part, seconds in parts)
        shown = [_number("{}", row[key]) for key in ("request_id", "step", "worker", "turns", "tokens")]
        rows.append((*shown[:3], f"{row['seconds']:.2f}", *shown[3:], where))
    return _table("Slowest requests", ("request", "step", "worker", "seconds", "turns", "tokens", "where"), rows)


def _pools(summary: dict[str, Any]) -> RenderableType | None:
    pools = list(summary["bubble"])
    rows = [
        (f"{part['index'] + 1} {part['mode']}", f"{part['seconds']:.1f}", *(f"{100 * part['bubble'][p]:.1f} %" for p in pools))
        for part in summary["segments"]
    ]
    title = "Bubble: part of a pool's time in which no phase ran"
    if (table := _table(title, ("part of the run", "seconds", *pools), rows)) is None:
        return None
    ratio = (summary["throughput"] or {}).get("ratio")
    more = f"  {ratio:.2f} times the steps a second in turns of one job after the other (median periods)" if ratio else ""
    return Group(table, *([Text(more)] if more else []))


def _jobs(summary: dict[str, Any]) -> RenderableType | None:
    jobs = {name: job for name, job in summary["jobs"].items() if job["phase_seconds"]}
    rows = []
    for name, job in jobs.items():
        moved = [sum(tag["seconds"] for tag in job[verb].values()) for verb in ("sleep", "wake")]
        phases = [job["phase_seconds"].get(phase) for phase in ("rollout", "train")]
        figures = [job["step_seconds"], *phases, sum(job["lease_wait_seconds"].values()), job["sync"]["seconds"], *moved]
        rows.append((name, str(job["steps"]), *(_number("{:.1f}", seconds) for seconds in figures)))
    columns = ("job", "steps", "a step", "rollout", "train", "waits", "sync", "sleep", "wake")
    table = _table("Jobs, seconds", columns, rows)
    return None if table is None else Group(table, *(_waited(name, job) for name, job in jobs.items()))


def _waited(name: str, job: dict[str, Any]) -> Text:
    phases = ", ".join(f"{seconds:.1f} s to {phase}" for phase, seconds in job["lease_wait_seconds"].items() if seconds >= 0.05)
    behind = ", ".join(f"{seconds:.1f} s behind {other}" for other, seconds in job["waited_behind"].items())
    return Text(f"  {name} waited {phases or 'for no lease'}" + (f"; {behind}" if behind else ""))


def render_comparison(rows: list[dict[str, Any]], one: str, other: str) -> RenderableType:
    """Two runs side by side, as `summary.compare` gives them."""
    cells = [
        (row["figure"], *("-" if row[key] is None else f"{row[key]:.4g}" for key in ("this", "that")),
         "" if row["change"] is None else f"{100 * row['change']:+.1f} %")
        for row in rows
    ]  # fmt: skip
    return _table(f"{one} against {other}", ("figure", "this", "that", "change"), cells) or Text(
        f"{one} against {other}: nothing"
    )
