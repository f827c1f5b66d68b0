"""A coordinator's snapshot for people: rich tables on a terminal, one plain line per node and job elsewhere.

Runs in `verl-mux status`, `top` and `run`, and at the coordinator's start; called by commands.py and top_command.py; pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Group, RenderableType


def plain(snapshot: dict[str, Any]) -> str:
    lines = [headline(snapshot), *_troubles(snapshot)]
    for pool, node, seen in _nodes(snapshot):
        about = [_bytes(seen), *filter(None, (_on_host(seen), _filled(seen)))]
        lines.append(f"node {pool}/{node}: {'; '.join([_runs(seen), _waits(seen), *about])}")
    lines += [f"host {name}: {_host(host)}" for name, host in snapshot.get("hosts", {}).items()]
    for name, job in snapshot["jobs"].items():
        lines.append(f"job {name}: {_state(job)}; {_step(job)}; {_metrics(job)}")
    lines += [f"group {name}: {'; '.join(cells)}" for name, *cells in _groups(snapshot)]
    return "\n".join([*lines, *_sentences(snapshot)])


def tables(snapshot: dict[str, Any]) -> Group:
    from rich.console import Group  # the coordinator, which has its words from here too, does without
    from rich.table import Table
    from rich.text import Text

    nodes = Table("pool", "node", "runs", "waits", "device memory", "host memory", "fillers")
    for pool, node, seen in _nodes(snapshot):
        nodes.add_row(pool, node, _runs(seen), _waits(seen), _bytes(seen), _on_host(seen) or "-", _filled(seen) or "-")
    jobs = Table("job", "state", "step", "metrics")
    for name, job in snapshot["jobs"].items():
        jobs.add_row(name, _state(job), _step(job), _metrics(job))
    parts: list[RenderableType] = [Text("\n".join([headline(snapshot), *_troubles(snapshot)])), nodes, jobs]
    if snapshot.get("hosts", {}):
        hosts = Table("host", "agent, memory, processes of jobs")
        for name, host in snapshot.get("hosts", {}).items():
            hosts.add_row(name, _host(host))
        parts.insert(2, hosts)
    if snapshot.get("placement"):
        groups = Table("group", "nodes", "seconds per step, predicted", "price")
        for row in _groups(snapshot):
            groups.add_row(*row)
        parts.append(groups)
    return Group(*parts, *(Text(line) for line in _sentences(snapshot)))


def headline(snapshot: dict[str, Any]) -> str:
    segment = snapshot["segment"]
    where = f"segment {segment['index'] + 1} of {segment['of']}"
    waiting = "" if snapshot["started"] else ", waiting for the expected jobs"
    return f"coordinator {snapshot['address']}: {segment['mode']} ({where}{waiting})"


def memory(snapshot: dict[str, Any]) -> list[str]:
    """Where the coordinator's journal lies, and what keeps it from granting."""
    path = snapshot["journal"]["path"]
    return [f"verl-mux journal: {path or 'none; a restart will know only what jobs say that they hold'}", *_troubles(snapshot)]


def _troubles(snapshot: dict[str, Any]) -> list[str]:
    """Why nothing is granted now, a line each."""
    journal, left = snapshot["journal"], snapshot["settling_s"]
    lines = []
    if left is not None:
        why = journal["lost"] or "it was stopped while it settled"
        lines.append(f"{why}: jobs say what they hold, and grants begin in {left:.1f} s")
    if journal["blocked"] is not None:
        lines.append(f"journal {journal['path']} cannot be written ({journal['blocked']}): nothing is granted until it can")
    return lines


def _nodes(snapshot: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for pool, members in snapshot["pools"].items():
        for node, seen in members["nodes"].items():
            yield pool, node, seen


def _groups(snapshot: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """One row per co-execution group that the coordinator formed, and one for jobs that wait to be placed."""
    placement = snapshot.get("placement") or {"groups": {}, "waiting": []}
    for name, group in placement["groups"].items():
        periods = [f"{job} {seconds:.1f} (at most {group['limits'][job]:.1f})" for job, seconds in group["periods"].items()]
        nodes = ", ".join([*group["nodes"]["rollout"], *group["nodes"]["train"]])
        yield name, nodes, f"{', '.join(periods)} [{group['source']}]", f"{group['usd_per_hour']:.2f} USD/h"
    if placement["waiting"]:
        yield "-", "waiting for nodes", ", ".join(placement["waiting"]), "-"


def _sentences(snapshot: dict[str, Any]) -> list[str]:
    """Why each job is where it is, and which jobs move."""
    moves = (snapshot.get("placement") or {}).get("moves", {})
    return [*snapshot.get("why", {}).values(), *(f"job {name} {sentence}" for name, sentence in moves.items())]


def _runs(node: dict[str, Any]) -> str:
    draining = " (draining)" if node.get("draining") else ""
    fenced = f" (fenced: {node['fenced']}; `verl-mux release` if you have looked)" if node.get("fenced") else ""
    return (", ".join(_holder(holder) for holder in node["holders"]) or "idle") + draining + fenced


def _host(host: dict[str, Any]) -> str:
    age = f" {host['age_s']:.1f} s ago" if host["age_s"] is not None else ""
    parts = [{"heard": f"agent heard{age}", "gone": f"agent gone, last heard{age}", "none": "no agent"}[host["agent"]]]
    if host["memory_total"]:
        parts.append(f"{_size(host['memory_free'])} of {_size(host['memory_total'])} host memory free")
    if host["processes"] is not None:
        held = "unknown" if host["device_bytes"] is None else _size(host["device_bytes"])
        parts.append(f"{host['processes']} processes of jobs, their device memory: {held}")
    return "; ".join([*parts, *(f"something of job {job} may be left there" for job in host["owed"])])


def _holder(holder: dict[str, Any]) -> str:
    note = f" [{holder['note']}]" if holder["note"] else ""
    state = " (being reclaimed)" if holder["state"] == "reclaiming" else " (overdue)" if holder["overdue"] else ""
    what = "(filler)" if holder["filler"] else f"{holder['phase']} {holder['step']}"
    return f"{holder['job']} {what}{note} for {holder['held_s']:.1f} s{state}"


def _waits(node: dict[str, Any]) -> str:
    return ", ".join(_request(request) for request in node["queue"]) or "nobody waits"


def _request(request: dict[str, Any]) -> str:
    why = f" ({request['held_back']})" if request["held_back"] else ""
    return f"{request['job']} {request['phase']} {request['step']} since {request['waited_s']:.1f} s{why}"


def _filled(node: dict[str, Any]) -> str:
    """What share of the time that jobs left on the node fillers used; empty where there was none."""
    usage = node["usage"]
    return f"fillers used {usage['bubble_filled']:.0%} of what jobs left" if usage["fillers_s"] else ""


def _bytes(node: dict[str, Any]) -> str:
    return f"{_size(node['bytes'])}, peak {_size(node['peak_bytes'])}"


def _on_host(node: dict[str, Any]) -> str:
    """Host memory that counts for the jobs there, and the limit; empty where neither is known."""
    held, capacity = node["host_memory"]["held"], node["host_memory"]["capacity"]
    if not held and capacity is None:
        return ""
    return f"{_size(held)}{f' of {_size(capacity)}' if capacity is not None else ''} on its host"


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"


def _state(job: dict[str, Any]) -> str:
    waits = f", waits for {', '.join(job['waits_for'])}" if job["waits_for"] else ""
    # A job that holds nothing and has no step to show, perhaps for minutes: its note says what it does.
    doing = job["note"] if not job["step"] and job["state"] == "live" else ""
    about = f" ({job['reason'] or doing})" if job["reason"] or doing else ""
    return f"{job['state']}{about}{waits}"


def _step(job: dict[str, Any]) -> str:
    if job["filler"]:
        return "filler, waits for room" if job["waiting"] else "filler"
    total = f" of {job['steps']}" if job["steps"] is not None else ""
    progress = f", {job['progress'][0]}/{job['progress'][1]} samples" if job["progress"] else ""
    return f"step {job['step']}{total}{progress}"


def _metrics(job: dict[str, Any]) -> str:
    return " ".join(f"{name}={value:.4g}" for name, value in job["metrics"].items()) or "-"
