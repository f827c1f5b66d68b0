"""The report as tables in a terminal. Makes renderables of a summary; prints nothing."""

from __future__ import annotations

from collections.abc import Iterator
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
    for table in (_jobs, _pools, _shares, _completion, _replicas, _nodes, _workers, _turns, _slowest, _engine):
        if (made := table(summary)) is not None:
            yield Padding(made, (1, 0, 0, 0))


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


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _shares(summary: dict[str, Any]) -> Table | None:
    if not summary["event_share"]:
        return None
    table = _table("Share of the step", "event", "%")
    for event, percent in list(summary["event_share"].items())[:MAX_ROWS]:
        table.add_row(escape(event), f"{percent:.2f}")
    return table


def _completion(summary: dict[str, Any]) -> Table | None:
    figures = summary["completion"]
    if not figures["per_step"]:
        return None
    table = _table("Seconds until that part of a step's requests was done", "step", "50 %", "80 %", "95 %", "all", "t80/all")
    rows = figures["per_step"]
    for row in rows[-MAX_ROWS:]:
        name = f"{row['job']} {row['step']}".strip()
        table.add_row(escape(name), *(f"{row[k]:.2f}" for k in ("p50", "p80", "p95", "total")), f"{row['t80_over_total']:.2f}")
    means = (f"{figures[k]:.2f}" for k in ("p50", "p80", "p95", "total", "t80_over_total"))
    table.add_row(f"mean of {len(rows)}", *means, style="bold")
    return table


def _workers(summary: dict[str, Any]) -> Table | None:
    """Workers side by side, those that were waited for first."""
    waits = [(wait, job, worker) for job, workers in summary["barrier_wait"].items() for worker, wait in workers.items()]
    if len(waits) < 2:
        return None
    table = _table("Rollout workers, means over steps", "worker", "waits at the barrier", "until 80 %", "until all", "tokens/s")
    for wait, job, worker in sorted(waits)[:MAX_ROWS]:
        rows = [r for r in summary["completion"]["per_worker"] if r["job"] == job and str(r["worker"]) == worker]
        means = [f"{sum(r[k] for r in rows) / len(rows):.2f}" if rows else "" for k in ("p80", "total")]
        rate = summary["engine"]["tokens_per_sec_by_worker"].get(job, {}).get(worker)
        table.add_row(escape(f"{job} {worker}".strip()), f"{wait:.2f}", *means, "" if rate is None else f"{rate:.0f}")
    return table


def _replicas(summary: dict[str, Any]) -> Table | None:
    return _engines("Replicas", "replica", summary["replicas"])


def _nodes(summary: dict[str, Any]) -> Table | None:
    return _engines("Nodes", "node", summary["nodes"]) if len(summary["nodes"]) > 1 else None


def _engines(title: str, by: str, rows: list[dict[str, Any]]) -> Table | None:
    if not rows:
        return None
    other = "nodes" if by == "replica" else "replicas"
    columns = ("stays", "tokens/s", "ms a token", "in the queue", "KV cache at most", "thrown out")
    table = _table(title, by, other, *columns)
    for row in rows[:MAX_ROWS]:
        pace, usage = row["seconds_per_token"], row["token_usage"]
        table.add_row(
            escape(f"{row['job']} {row[by]}".strip()), escape(", ".join(map(str, row[other]))), str(row["stays"]),
            f"{row['tokens_per_sec'] or 0:.0f}", "" if pace is None else f"{1000 * pace:.1f}", f"{100 * row['queue_part']:.1f} %",
            "" if usage is None else f"{100 * usage:.0f} %", str(row["retractions"]),
        )  # fmt: skip
    return table


def _turns(summary: dict[str, Any]) -> Table | None:
    turns = summary["turns"]
    if len(turns["counts"]) < 2 and len(turns["engine_seconds"]) < 2:
        return None
    table = _table("Turns", "turns", "requests", "%", "seconds a request", "engine s in that turn")
    for count in list(turns["counts"])[:MAX_ROWS]:
        engine = turns["engine_seconds"].get(count)
        table.add_row(
            count, str(turns["counts"][count]), f"{100 * turns['share'][count]:.1f}",
            f"{turns['request_seconds'][count]:.2f}", "" if engine is None else f"{engine:.2f}",
        )  # fmt: skip
    return table


def _slowest(summary: dict[str, Any]) -> Table | None:
    if not summary["slowest_requests"]:
        return None
    table = _table("Slowest requests", "request", "step", "worker", "seconds", "turns", "tokens", "where")
    for row in summary["slowest_requests"][:5]:
        least = 0.05 * row["seconds"]
        parts = sorted((part for part in row["parts"].items() if part[1] >= least), key=lambda item: -item[1])[:3]
        where = ", ".join(f"{part} {seconds:.2f}" for part, seconds in parts)
        shown = (row[k] for k in ("request_id", "step", "worker"))
        counted = ("" if row[k] is None else str(row[k]) for k in ("turns", "tokens"))
        table.add_row(*(escape(str(value)) for value in shown), f"{row['seconds']:.2f}", *counted, where)
    return table


def _pools(summary: dict[str, Any]) -> RenderableType | None:
    if not summary["segments"]:
        return None
    pools = list(summary["bubble"])
    table = _table("Bubble: part of a pool's time in which no phase ran", "part of the run", "seconds", *pools)
    for segment in summary["segments"]:
        bubbles = (f"{100 * segment['bubble'][pool]:.1f} %" for pool in pools)
        table.add_row(f"{segment['index'] + 1} {segment['mode']}", f"{segment['seconds']:.1f}", *bubbles)
    return Group(table, *_throughput(summary["throughput"]))


def _throughput(found: dict[str, Any] | None) -> Iterator[Text]:
    if found:
        yield Text(f"  {found['ratio']:.2f} times the steps a second in turns of one job after the other (median periods)")


def _jobs(summary: dict[str, Any]) -> RenderableType | None:
    jobs = {name: job for name, job in summary["jobs"].items() if job["phase_seconds"]}
    if not jobs:
        return None
    columns = ("steps", "a step", "rollout", "train", "waits", "sync", "sleep", "wake")
    table = _table("Jobs, seconds", "job", *columns)
    for name, job in jobs.items():
        phase, wait = job["phase_seconds"], job["lease_wait_seconds"]
        moved = [sum(tag["seconds"] for tag in job[verb].values()) for verb in ("sleep", "wake")]
        seconds = [phase.get("rollout"), phase.get("train"), sum(wait.values())]
        figures = [job["step_seconds"], *seconds, job["sync"]["seconds"], *moved]
        table.add_row(escape(name), str(job["steps"]), *("" if s is None else f"{s:.1f}" for s in figures))
    return Group(table, *(_waited(name, job) for name, job in jobs.items()))


def _waited(name: str, job: dict[str, Any]) -> Text:
    phases = ", ".join(f"{seconds:.1f} s to {phase}" for phase, seconds in job["lease_wait_seconds"].items() if seconds >= 0.05)
    behind = ", ".join(f"{seconds:.1f} s behind {other}" for other, seconds in job["waited_behind"].items())
    return Text(f"  {name} waited {phases or 'for no lease'}" + (f"; {behind}" if behind else ""))


def _engine(summary: dict[str, Any]) -> Table | None:
    reports = summary["engine"]["reports"]
    if not reports or summary["replicas"]:
        return None
    table = _table("Engines", "replica", "tokens/s", "best", "KV cache at most", "queued at most")
    for row in reports[:MAX_ROWS]:
        name = f"{row['job']} {row['worker']}".strip()
        usage = "" if row["token_usage"] is None else f"{100 * row['token_usage']:.0f} %"
        rates = (f"{row[k] or 0:.0f}" for k in ("tokens_per_sec", "best_tokens_per_sec"))
        table.add_row(escape(name), *rates, usage, f"{row['queued'] or 0:.0f}")
    return table


def render_comparison(rows: list[dict[str, Any]], one: str, other: str) -> Table:
    """Two runs side by side, as `summary.compare` gives them."""
    table = _table(f"{one} against {other}", "figure", "this", "that", "change")
    for row in rows:
        change = "" if row["change"] is None else f"{100 * row['change']:+.1f} %"
        table.add_row(escape(row["figure"]), _number(row["this"]), _number(row["that"]), change)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
