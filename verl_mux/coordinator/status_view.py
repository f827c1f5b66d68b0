"""A coordinator's snapshot for people: rows that a terminal shows as tables, and elsewhere one plain line per node and job.

Runs on the command line, and `memory` in the coordinator; called by commands.py, top_command.py and launcher/watch.py; pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Group

_COLUMNS = {
    "node": ("runs", "waits", "device memory", "host memory", "fillers"),
    "host": ("agent", "memory", "processes of jobs", "left over"),
    "job": ("state", "step", "metrics"),
    "group": ("nodes", "seconds per step, predicted", "price"),
}


def plain(snapshot: dict[str, Any]) -> str:
    """One line per node, host, job and group; cells without a value are left out."""
    lines = [headline(snapshot), *_troubles(snapshot)]
    for kind, rows in _rows(snapshot).items():
        lines += [f"{kind} {name}: {'; '.join(cell for cell in cells if cell)}" for name, *cells in rows]
    return "\n".join([*lines, *_sentences(snapshot)])


def tables(snapshot: dict[str, Any]) -> Group:
    """A table for each kind of row that is there."""
    from rich.console import Group  # the coordinator itself needs no rich
    from rich.table import Table
    from rich.text import Text

    shown: list[Any] = [Text("\n".join([headline(snapshot), *_troubles(snapshot)]))]
    for kind, rows in _rows(snapshot).items():
        table = Table(kind, *_COLUMNS[kind])
        for row in rows:
            table.add_row(*(Text(cell or "-") for cell in row))
        shown += [table] if rows or kind in ("node", "job") else []
    return Group(*shown, *(Text(line) for line in _sentences(snapshot)))


def headline(snapshot: dict[str, Any]) -> str:
    segment = snapshot["segment"]
    where = f"segment {segment['index'] + 1} of {segment['of']}"
    waiting = "" if snapshot["started"] else ", waiting for the expected jobs"
    return f"coordinator {snapshot['address']}: {segment['mode']} ({where}{waiting})"


def memory(snapshot: dict[str, Any]) -> list[str]:
    """Where the coordinator's journal is, and what keeps it from granting leases."""
    path = snapshot["journal"]["path"]
    return [f"verl-mux journal: {path or 'none; a restart will know only what jobs say that they hold'}", *_troubles(snapshot)]


def _troubles(snapshot: dict[str, Any]) -> list[str]:
    journal, left = snapshot["journal"], snapshot["settling_s"]
    lines = []
    if left is not None:
        why = journal["lost"] or "it was stopped while it settled"
        lines.append(f"{why}: jobs say what they hold, and grants begin in {left:.1f} s")
    if journal["blocked"] is not None:
        lines.append(f"journal {journal['path']} cannot be written ({journal['blocked']}): nothing is granted until it can")
    return lines


def _sentences(snapshot: dict[str, Any]) -> list[str]:
    """Why each job is where it is, and where it moves."""
    moves = (snapshot.get("placement") or {}).get("moves", {})
    return [*snapshot.get("why", {}).values(), *(f"job {name} {sentence}" for name, sentence in moves.items())]


def _rows(snapshot: dict[str, Any]) -> dict[str, list[tuple[str, ...]]]:
    nodes = [(f"{pool}/{name}", *_node(node)) for pool, its in snapshot["pools"].items() for name, node in its["nodes"].items()]
    return {
        "node": nodes,
        "host": [(name, *_host(host)) for name, host in snapshot.get("hosts", {}).items()],
        "job": [(name, _state(job), _step(job), _metrics(job)) for name, job in snapshot["jobs"].items()],
        "group": list(_groups(snapshot.get("placement") or {"groups": {}, "waiting": []})),
    }


def _node(node: dict[str, Any]) -> tuple[str, ...]:
    runs = ", ".join(_holder(holder) for holder in node["holders"]) or "idle"
    runs += " (draining)" if node.get("draining") else ""
    runs += f" (fenced: {node['fenced']}; `verl-mux release` if you have looked)" if node.get("fenced") else ""
    waits = ", ".join(_request(request) for request in node["queue"]) or "no job waits"
    held, capacity = node["host_memory"]["held"], node["host_memory"]["capacity"]
    whole = f" of {_size(capacity)}" if capacity is not None else ""
    on_host = f"{_size(held)}{whole} on its host" if held or capacity is not None else ""
    usage = node["usage"]
    filled = f"fillers used {usage['bubble_filled']:.0%} of what jobs left" if usage["fillers_s"] else ""
    return runs, waits, f"{_size(node['bytes'])}, peak {_size(node['peak_bytes'])}", on_host, filled


def _holder(holder: dict[str, Any]) -> str:
    note = f" [{holder['note']}]" if holder["note"] else ""
    state = " (being reclaimed)" if holder["state"] == "reclaiming" else " (overdue)" if holder["overdue"] else ""
    phase = "(filler)" if holder["filler"] else f"{holder['phase']} {holder['step']}"
    return f"{holder['job']} {phase}{note} for {holder['held_s']:.1f} s{state}"


def _request(request: dict[str, Any]) -> str:
    why = f" ({request['held_back']})" if request["held_back"] else ""
    return f"{request['job']} {request['phase']} {request['step']} since {request['waited_s']:.1f} s{why}"


def _host(host: dict[str, Any]) -> tuple[str, ...]:
    age = f" {host['age_s']:.1f} s ago" if host["age_s"] is not None else ""
    agent = {"heard": f"agent heard{age}", "gone": f"agent gone, last heard{age}", "none": "no agent"}[host["agent"]]
    total, device = host["memory_total"], host["device_bytes"]
    free = f"{_size(host['memory_free'])} of {_size(total)} host memory free" if total else ""
    held = "unknown" if device is None else _size(device)
    of_jobs = f"{host['processes']} processes of jobs, their device memory: {held}" if host["processes"] is not None else ""
    return agent, free, of_jobs, "; ".join(f"something of job {job} may be left there" for job in host["owed"])


def _groups(placement: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """One row per co-execution group that the coordinator formed, and one for the jobs that wait to be placed."""
    for name, group in placement["groups"].items():
        periods = [f"{job} {seconds:.1f} (at most {group['limits'][job]:.1f})" for job, seconds in group["periods"].items()]
        nodes = ", ".join([*group["nodes"]["rollout"], *group["nodes"]["train"]])
        yield name, nodes, f"{', '.join(periods)} [{group['source']}]", f"{group['usd_per_hour']:.2f} USD/h"
    if placement["waiting"]:
        yield "-", "waiting for nodes", ", ".join(placement["waiting"]), "-"


def _state(job: dict[str, Any]) -> str:
    waits = f", waits for {', '.join(job['waits_for'])}" if job["waits_for"] else ""
    doing = job["reason"] or (f"{now}, {job['note_s']:.0f} s" if (now := stage(job)) else "")
    return f"{job['state']}{f' ({doing})' if doing else ''}{waits}"


def stage(job: dict[str, Any]) -> str:
    """What a job does before its first step; empty when it has begun, or does nothing."""
    if job["state"] != "live" or job["step"] or not job["note"]:
        return ""
    return "first weights" if job["note"] == "sync" else job["note"]


def _step(job: dict[str, Any]) -> str:
    if job["filler"]:
        return "filler, waits for room" if job["waiting"] else "filler"
    total = f" of {job['steps']}" if job["steps"] is not None else ""
    progress = f", {job['progress'][0]}/{job['progress'][1]} samples" if job["progress"] else ""
    return f"step {job['step']}{total}{progress}"


def _metrics(job: dict[str, Any]) -> str:
    return " ".join(f"{name}={value:.4g}" for name, value in job["metrics"].items()) or "-"


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"
