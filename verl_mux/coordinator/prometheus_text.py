"""Prometheus's text format, and a coordinator's snapshot in it. Pure: others serve it, nothing here opens a socket."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Sample = tuple[str, Mapping[str, str], Any]  # metric, labels, value

# metric -> (type, help)
METRICS = {
    "mux_segment_index": ("gauge", "Index of the schedule's current segment; label mode says how jobs share nodes."),
    "mux_lease_token": ("counter", "The last fencing token given out: leases granted so far."),
    "mux_refused": ("counter", "Connections, frames and messages refused; label reason says why."),
    "mux_node_busy": ("gauge", "1 while a job holds a lease that names the node."),
    "mux_node_filled": ("gauge", "1 while a filler holds a lease that names the node."),
    "mux_node_seconds": ("counter", "Seconds since the first lease on the node."),
    "mux_node_job_seconds": ("counter", "Seconds for which jobs held the node."),
    "mux_node_filler_seconds": ("counter", "Seconds for which fillers held the node."),
    "mux_node_queue_length": ("gauge", "Requests of jobs for leases that wait for the node."),
    "mux_node_bytes": ("gauge", "Tagged bytes of all jobs on the node."),
    "mux_node_peak_bytes": ("gauge", "The most tagged bytes of all jobs together on the node."),
    "mux_node_host_capacity_bytes": ("gauge", "Host memory of the node that jobs may hold, where the configuration says."),
    "mux_node_host_bytes": ("gauge", "Host memory that counts for a job on the node: told, or measured."),
    "mux_node_host_measured_bytes": ("gauge", "Host memory of a job's processes on the node, by kind; source: whose word."),
    "mux_node_fenced": ("gauge", "1 while nobody gets the node because nobody can say that it is empty."),
    "mux_node_draining": ("gauge", "1 while nobody gets the node because somebody took it out."),
    "mux_host_agent_up": ("gauge", "1 while the host's agent is heard, 0 while it is not."),
    "mux_host_agent_age_seconds": ("gauge", "Since the host's agent was heard last."),
    "mux_host_memory_free_bytes": ("gauge", "Host memory that is available, as the agent says."),
    "mux_host_memory_bytes": ("gauge", "Host memory, as the agent says."),
    "mux_host_device_bytes": ("gauge", "Device memory on the host; label of says whose: jobs or others."),
    "mux_node_usd_per_hour": ("gauge", "Price of the node."),
    "mux_lease_held_seconds": ("gauge", "How long a job has held its lease on the node."),
    "mux_lease_waited_seconds": ("gauge", "How long a job has waited for a lease on the node."),
    "mux_job_state": ("gauge", "1 for the state that the job is in."),
    "mux_job_step": ("gauge", "The step that the job is at."),
    "mux_job_steps_done": ("counter", "Steps that the job has finished."),
    "mux_job_progress": ("gauge", "Part of the step's samples that are done, 0 to 1."),
    "mux_job_metric": ("gauge", "What the job reported at its last step; label name says which figure."),
}


def prometheus_text(snapshot: Mapping[str, Any]) -> str:
    """The text of a scrape. `snapshot` is what the coordinator's status gives; what it lacks is left out."""
    parts = (
        _run(snapshot),
        _nodes(snapshot.get("pools", {})),
        _hosts(snapshot.get("hosts", {})),
        _jobs(snapshot.get("jobs", {})),
    )
    return as_text(METRICS, itertools.chain(*parts))


def as_text(metrics: Mapping[str, tuple[str, str]], samples: Iterable[Sample]) -> str:
    """metrics: name -> (type, help), in the order of the text. Values that are no numbers are left out, and so are metrics
    without any. Raises KeyError for a sample of no metric."""
    found: dict[str, list[str]] = {name: [] for name in metrics}
    for name, labels, value in samples:
        if isinstance(value, (int, float)):
            found[name].append(f"{name}{_labels(labels)} {_number(value)}\n")
    heads = {name: f"# HELP {name} {text}\n# TYPE {name} {kind}\n" for name, (kind, text) in metrics.items()}
    return "".join(heads[name] + "".join(lines) for name, lines in found.items() if lines)


def _run(snapshot: Mapping[str, Any]) -> Iterator[Sample]:
    segment = snapshot.get("segment") or {}
    yield "mux_segment_index", {"mode": segment.get("mode", "")}, segment.get("index")
    yield "mux_lease_token", {}, snapshot.get("token")
    for reason, number in (snapshot.get("refused") or {}).items():
        yield "mux_refused", {"reason": reason}, number


def _nodes(pools: Mapping[str, Any]) -> Iterator[Sample]:
    for pool, about in pools.items():
        for node, seen in about.get("nodes", {}).items():
            where = {"pool": pool, "node": node}
            fillers = [bool(holder.get("filler")) for holder in seen.get("holders", ())]
            yield "mux_node_busy", where, int(not all(fillers))
            yield "mux_node_filled", where, int(any(fillers))
            usage = seen.get("usage", {})
            for name, of in (("", "seconds"), ("job_", "jobs_s"), ("filler_", "fillers_s")):
                yield f"mux_node_{name}seconds", where, usage.get(of)
            yield "mux_node_queue_length", where, len(seen.get("queue", ()))
            yield "mux_node_bytes", where, seen.get("bytes")
            yield "mux_node_peak_bytes", where, seen.get("peak_bytes")
            yield from _host_memory(where, seen.get("host_memory", {}))
            yield "mux_node_usd_per_hour", where, seen.get("usd_per_hour")
            yield "mux_node_fenced", where, int(bool(seen.get("fenced")))
            yield "mux_node_draining", where, int(bool(seen.get("draining")))
            for holder in seen.get("holders", ()):
                yield "mux_lease_held_seconds", where | _lease(holder), holder.get("held_s")
            for waiting in seen.get("queue", ()):
                yield "mux_lease_waited_seconds", where | _lease(waiting), waiting.get("waited_s")


def _host_memory(where: dict[str, str], about: Mapping[str, Any]) -> Iterator[Sample]:
    yield "mux_node_host_capacity_bytes", where, about.get("capacity")
    for job, held in about.get("jobs", {}).items():
        yield "mux_node_host_bytes", where | {"job": job}, held["counted"]
        for kind, num_bytes in held["measured"].items():
            yield "mux_node_host_measured_bytes", where | {"job": job, "kind": kind, "source": held["source"]}, num_bytes


def _hosts(hosts: Mapping[str, Any]) -> Iterator[Sample]:
    for host, about in hosts.items():
        where = {"host": host}
        yield "mux_host_agent_up", where, {"heard": 1, "gone": 0}.get(about.get("agent"))
        yield "mux_host_agent_age_seconds", where, about.get("age_s")
        yield "mux_host_memory_free_bytes", where, about.get("memory_free")
        yield "mux_host_memory_bytes", where, about.get("memory_total")
        yield "mux_host_device_bytes", where | {"of": "jobs"}, about.get("device_bytes")
        yield "mux_host_device_bytes", where | {"of": "others"}, about.get("device_bytes_of_others")


def _lease(about: Mapping[str, Any]) -> dict[str, str]:
    return {"job": about.get("job", ""), "phase": about.get("phase", "")}


def _jobs(jobs: Mapping[str, Any]) -> Iterator[Sample]:
    for job, about in jobs.items():
        yield "mux_job_state", {"job": job, "state": about.get("state", "")}, 1
        yield "mux_job_step", {"job": job}, about.get("step")
        yield "mux_job_steps_done", {"job": job}, about.get("steps_done")
        done, total = about.get("progress") or (None, None)
        if total:
            yield "mux_job_progress", {"job": job}, done / total
        for name, value in (about.get("metrics") or {}).items():
            yield "mux_job_metric", {"job": job, "name": name}, value


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_escape(str(value))}"' for key, value in labels.items()) + "}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value) or math.isinf(value):
        return {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN")
    return str(int(value)) if value == int(value) else repr(value)
