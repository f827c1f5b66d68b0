"""A coordinator's snapshot for people: rich tables on a terminal, one plain line per node and job elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Group, RenderableType


def plain(snapshot: dict[str, Any]) -> str:
    lines = [headline(snapshot), *_troubles(snapshot)]
    for pool, node, seen in _nodes(snapshot):
        told = f"{_bytes(seen)}{_on_host(seen, '; ')}{_filled(seen, '; ')}"
        lines.append(f"node {pool}/{node}: {_runs(seen)}; {_waits(seen)}; {told}")
    lines += [f"host {name}: {_host(host)}" for name, host in snapshot.get("hosts", {}).items()]
    for name, job in snapshot["jobs"].items():
        lines.append(f"job {name}: {_state(job)}; {_step(job)}; {_metrics(job)}")
    lines += [f"group {name}: {'; '.join(cells)}" for name, *cells in _groups(snapshot)]
    lines += [*_why(snapshot), *_moves(snapshot)]
    return "\n".join(lines)


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
    parts += [Text(line) for line in (*_why(snapshot), *_moves(snapshot))]
    return Group(*parts)


def headline(snapshot: dict[str, Any]) -> str:
    segment = snapshot["segment"]
    where = f"segment {segment['index'] + 1} of {segment['of']}"
    waiting = "" if snapshot["started"] else ", waiting for the expected jobs"
    return f"coordinator {snapshot['address']}: {segment['mode']} ({where}{waiting})"


def memory(snapshot: dict[str, Any]) -> list[str]:
    """Where the coordinator remembers, and what keeps it from granting."""
    path = snapshot["journal"]["path"]
    return [f"verl-mux journal: {path or 'none; a restart will know only what jobs say that they hold'}", *_troubles(snapshot)]


def _troubles(snapshot: dict[str, Any]) -> list[str]:
    """Why nothing is granted now, a line each."""
    found, left = snapshot["journal"], snapshot["settling_s"]
    lines = []
    if left is not None:
        why = found["lost"] or "it was stopped while it settled"
        lines.append(f"{why}: jobs say what they hold, and grants begin in {left:.1f} s")
    if found["blocked"] is not None:
        lines.append(f"journal {found['path']} cannot be written ({found['blocked']}): nothing is granted until it can")
    return lines


def _nodes(snapshot: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for pool, members in snapshot["pools"].items():
        for node, seen in members["nodes"].items():
            yield pool, node, seen


def _groups(snapshot: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """One row per co-execution group that the coordinator formed, and one for who waits to be placed."""
    placement = snapshot.get("placement") or {"groups": {}, "waiting": []}
    for name, group in placement["groups"].items():
        periods = [f"{job} {seconds:.1f} (at most {group['limits'][job]:.1f})" for job, seconds in group["periods"].items()]
        nodes = ", ".join([*group["nodes"]["rollout"], *group["nodes"]["train"]])
        yield name, nodes, f"{', '.join(periods)} [{group['source']}]", f"{group['usd_per_hour']:.2f} USD/h"
    if placement["waiting"]:
        yield "-", "waiting for nodes", ", ".join(placement["waiting"]), "-"


def _moves(snapshot: dict[str, Any]) -> list[str]:
    moves = (snapshot.get("placement") or {}).get("moves", {})
    return [f"job {name} {sentence}" for name, sentence in moves.items()]


def _why(snapshot: dict[str, Any]) -> list[str]:
    """A sentence a job."""
    return list(snapshot.get("why", {}).values())


def _runs(node: dict[str, Any]) -> str:
    runs = ", ".join(_holder(holder) for holder in node["holders"]) or "idle"
    marks = "".join(f" ({mark})" for mark in ("draining",) if node.get(mark))
    return f"{runs}{marks}{_fenced(node)}"


def _fenced(node: dict[str, Any]) -> str:
    return f" (fenced: {node['fenced']}; `verl-mux release` if you have looked)" if node.get("fenced") else ""


def _host(host: dict[str, Any]) -> str:
    age = f" {host['age_s']:.1f} s ago" if host["age_s"] is not None else ""
    said = {"heard": f"agent heard{age}", "gone": f"agent gone, last heard{age}", "none": "no agent"}[host["agent"]]
    parts = [said]
    if host["memory_total"]:
        parts.append(f"{_size(host['memory_free'])} of {_size(host['memory_total'])} host memory free")
    if host["processes"] is not None:
        held = "unknown" if host["device_bytes"] is None else _size(host["device_bytes"])
        parts.append(f"{host['processes']} processes of jobs, their device memory: {held}")
    parts += [f"something of job {job} may be left there" for job in host["owed"]]
    return "; ".join(parts)


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


def _filled(node: dict[str, Any], before: str = "") -> str:
    """What share of the time that jobs left on the node fillers used; nothing where there was none."""
    usage = node["usage"]
    return f"{before}fillers used {usage['bubble_filled']:.0%} of what jobs left" if usage["fillers_s"] else ""


def _bytes(node: dict[str, Any]) -> str:
    return f"{_size(node['bytes'])}, peak {_size(node['peak_bytes'])}"


def _on_host(node: dict[str, Any], before: str = "") -> str:
    """Host memory that counts for the jobs there, and of how much; nothing where nobody knows of any."""
    held, capacity = node["host_memory"]["held"], node["host_memory"]["capacity"]
    if not held and capacity is None:
        return ""
    return f"{before}{_size(held)}{f' of {_size(capacity)}' if capacity is not None else ''} on its host"


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"


def _state(job: dict[str, Any]) -> str:
    waits = f", waits for {', '.join(job['waits_for'])}" if job["waits_for"] else ""
    # Minutes in which a job holds nothing and has no step to show: what it does then, it says itself.
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
