"""Several runs of one job in one directory, told apart: each becomes a job of its own, `a (run 1)`, `a (run 2)`.

While files are read, a job's name carries its run's mark; when all is read, the marks become numbers, in order of time, or
vanish where there is one run only. The coordinator names jobs and not runs: its events belong to the run that had begun last.
"""

from __future__ import annotations

import bisect
from dataclasses import fields, replace

import polars as pl

from verl_mux.profiling.report.input.reduction import Tables

_MARK = "\x1f"


def marked(job: str, run: str) -> pl.Expr:
    """The column `job` with the mark of the column `run`, where a line names one."""
    return pl.when(pl.col(run).is_null()).then(pl.col(job)).otherwise(pl.concat_str(job, run, separator=_MARK)).alias(job)


def told_apart(tables: Tables) -> Tables:
    """The same tables, every job under the name that people read."""
    names, begins = _names(tables.totals)
    frames = {field.name: getattr(tables, field.name) for field in fields(tables)}
    renamed = {name: frame.with_columns(pl.col("job").replace(names)) for name, frame in frames.items()}
    if begins:
        renamed["spans"] = _of_coordinator(renamed["spans"], begins)
    return replace(tables, **renamed)


def _names(totals: pl.DataFrame) -> tuple[dict[str, str], dict[str, tuple[list[float], list[str]]]]:
    """Marked name -> name; of jobs with several runs: when each run began, and its name."""
    runs: dict[str, list[tuple[float, str]]] = {}
    for label, first in totals.group_by("job").agg(pl.col("first").min()).sort("first").rows():
        runs.setdefault(label.partition(_MARK)[0], []).append((first, label))
    names, begins = {}, {}
    for job, found in runs.items():
        if len(found) == 1:
            names[found[0][1]] = job
            continue
        told = [f"{job} (run {number})" for number in range(1, len(found) + 1)]
        names.update(zip((label for _, label in found), told, strict=True))
        begins[job] = ([first for first, _ in found], told)
    return names, begins


def _of_coordinator(spans: pl.DataFrame, begins: dict[str, tuple[list[float], list[str]]]) -> pl.DataFrame:
    def run_of(row: dict) -> str | None:
        job = row["of_job"]
        if job not in begins:
            return job
        starts, names = begins[job]
        return names[max(bisect.bisect_right(starts, row["end"]) - 1, 0)]

    of_job = spans.select(pl.struct("of_job", "end").map_elements(run_of, pl.String, skip_nulls=False)).to_series()
    return spans.with_columns(of_job.alias("of_job"))
