"""Two runs against each other, figure by figure. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def compare(this: dict[str, Any], that: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of `figure`, `this`, `that` and `change` (this over that, minus 1; None when one is missing or that is 0)."""
    mine, theirs = dict(_figures(this)), dict(_figures(that))
    names = [*mine, *(name for name in theirs if name not in mine)]
    return [_row(name, mine.get(name), theirs.get(name)) for name in names]


def _row(name: str, this: float | None, that: float | None) -> dict[str, Any]:
    change = None if this is None or not that else round(this / that - 1, 6)
    return {"figure": name, "this": this, "that": that, "change": change}


def _figures(summary: dict[str, Any]) -> Iterator[tuple[str, float | None]]:
    completion = summary["completion"]
    for name in ("total", "p50", "p80", "p95", "p99"):
        yield f"seconds to {name}", completion.get(name)
    yield "t80_over_total", completion["t80_over_total"]
    yield "requests", summary["requests"]
    yield "turns a request", summary["turns"]["mean"]
    for event, percent in summary["event_share"].items():
        yield f"{event} %", percent
    yield "steps a second in turns over alone", (summary["throughput"] or {}).get("ratio")
    for pool, bubble in summary["bubble"].items():
        yield f"bubble {pool}", bubble
    for job, figures in summary["jobs"].items():
        if figures["phase_seconds"]:
            yield from _job_figures(job, figures)


def _job_figures(job: str, figures: dict[str, Any]) -> Iterator[tuple[str, float | None]]:
    yield f"{job}: seconds a step", figures["step_seconds"]
    yield f"{job}: lease wait", round(sum(figures["lease_wait_seconds"].values()), 6)
    yield f"{job}: sync", figures["sync"]["seconds"]
    for verb in ("sleep", "wake"):
        yield f"{job}: {verb}", round(sum(tag["seconds"] for tag in figures[verb].values()), 6)
