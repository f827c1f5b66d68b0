"""Serves figures to Prometheus at /metrics: a coordinator's from its snapshot, or those that `verl-mux top` gives.

Runs in a thread of the coordinator's process or of `verl-mux top`; called by commands.py and top_command.py; opens the port.
Needs the package prometheus_client, so it is imported only when a port is given.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import Metric, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from verl_mux.errors import Failure, UserError

Sample = tuple[str, Mapping[str, str], Any]  # metric, labels, value
Metrics = Mapping[str, tuple[str, str]]  # name -> (type, help), in the order in which they are served

# Counters have the type `unknown`: the library would rename a counter to *_total.
METRICS = {
    "mux_segment_index": ("gauge", "Index of the schedule's current segment; label mode says how jobs share nodes."),
    "mux_lease_token": ("unknown", "The last fencing token granted: the number of leases so far."),
    "mux_refused": ("unknown", "Frames and messages refused; label reason says why."),
    "mux_node_busy": ("gauge", "1 while a job holds a lease that names the node."),
    "mux_node_filled": ("gauge", "1 while a filler holds a lease that names the node."),
    "mux_node_seconds": ("unknown", "Seconds since the first lease on the node."),
    "mux_node_job_seconds": ("unknown", "Seconds for which jobs held the node."),
    "mux_node_filler_seconds": ("unknown", "Seconds for which fillers held the node."),
    "mux_node_queue_length": ("gauge", "Requests of jobs for leases that wait for the node."),
    "mux_node_bytes": ("gauge", "Tagged bytes of all jobs on the node."),
    "mux_node_peak_bytes": ("gauge", "The most tagged bytes of all jobs together on the node."),
    "mux_node_host_capacity_bytes": ("gauge", "Host memory of the node that jobs may hold, where the configuration says."),
    "mux_node_host_bytes": ("gauge", "Host memory that counts for a job on the node: declared, or measured."),
    "mux_node_host_measured_bytes": ("gauge", "Host memory of a job's processes on the node, by kind; source: agent or job."),
    "mux_node_fenced": ("gauge", "1 while the node is not granted because nothing shows that it is empty."),
    "mux_node_draining": ("gauge", "1 while the node is not granted because the coordinator's file drains it."),
    "mux_host_agent_up": ("gauge", "1 while the host's agent is heard, 0 while it is not."),
    "mux_host_agent_age_seconds": ("gauge", "Seconds since the host's agent was heard last."),
    "mux_host_memory_free_bytes": ("gauge", "Host memory that is available, as the agent says."),
    "mux_host_memory_bytes": ("gauge", "Host memory, as the agent says."),
    "mux_host_device_bytes": ("gauge", "Device memory on the host; label of: that of jobs or of others."),
    "mux_node_usd_per_hour": ("gauge", "Price of the node."),
    "mux_lease_held_seconds": ("gauge", "How long a job has held its lease on the node."),
    "mux_lease_waited_seconds": ("gauge", "How long a job has waited for a lease on the node."),
    "mux_job_state": ("gauge", "1 for the state that the job is in."),
    "mux_job_step": ("gauge", "The step that the job is at."),
    "mux_job_steps_done": ("unknown", "Steps that the job has finished."),
    "mux_job_progress": ("gauge", "Part of the step's samples that are done, 0 to 1."),
    "mux_job_metric": ("gauge", "A figure that the job reported at its last step; label name says which."),
}


class Figures(Collector):
    """`samples` of `metrics` as the library collects them, anew at each scrape.

    Values that are no numbers are left out, and so are metrics without any. `collect` raises what `samples` raises, and KeyError
    for a sample of no metric.
    """

    def __init__(self, metrics: Metrics, samples: Callable[[], Iterable[Sample]]) -> None:
        self._metrics, self._samples = metrics, samples

    def collect(self) -> Iterator[Metric]:
        families = {name: Metric(name, text, kind) for name, (kind, text) in self._metrics.items()}
        for name, labels, value in self._samples():
            if isinstance(value, (int, float)):
                families[name].add_sample(name, dict(labels), value)
        return (family for family in families.values() if family.samples)


@contextlib.contextmanager
def serve_metrics(figures: Figures, port: int, host: str) -> Iterator[int]:
    """Answers `GET /metrics` for the length of the block; stderr says where. Yields the port; 0 takes a free one.

    A Failure of the figures (the coordinator has stopped) becomes status 503. Raises UserError for a port that cannot be had.
    """
    if not 0 <= port < 2**16:
        raise UserError(f"metrics port {port}: a number from 0 (any free one) to 65535 is allowed")
    try:
        server = make_server(host, port, _application(figures), ThreadingWSGIServer, _Quiet)
    except OSError as error:
        raise UserError(f"cannot serve metrics at {host}:{port}: {error.strerror}; name a free port") from error
    thread = threading.Thread(target=server.serve_forever, name="verl-mux-metrics", daemon=True)
    thread.start()
    name = socket.gethostname() if host == "0.0.0.0" else host
    print(f"verl-mux metrics at http://{name}:{server.server_port}/metrics", file=sys.stderr, flush=True)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """A scrape every few seconds is no news."""


def _application(figures: Figures) -> Callable[..., Iterable[bytes]]:
    serve = make_wsgi_app(figures)

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        try:
            return serve(environ, start_response)
        except Failure as error:
            start_response("503 Service Unavailable", [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{error}\n".encode()]

    return answer


def coordinator_samples(snapshot: Mapping[str, Any]) -> Iterator[Sample]:
    """METRICS of a snapshot, as `verl-mux status` shows it; what it lacks is left out."""
    segment = snapshot.get("segment") or {}
    yield "mux_segment_index", {"mode": segment.get("mode", "")}, segment.get("index")
    yield "mux_lease_token", {}, snapshot.get("token")
    for reason, number in (snapshot.get("refused") or {}).items():
        yield "mux_refused", {"reason": reason}, number
    for pool, about in snapshot.get("pools", {}).items():
        for node, seen in about.get("nodes", {}).items():
            yield from _node({"pool": pool, "node": node}, seen)
    for host, about in snapshot.get("hosts", {}).items():
        yield from _host({"host": host}, about)
    for job, about in snapshot.get("jobs", {}).items():
        yield from _job({"job": job}, about)


def _node(where: dict[str, str], seen: Mapping[str, Any]) -> Iterator[Sample]:
    fillers = [bool(holder.get("filler")) for holder in seen.get("holders", ())]
    yield "mux_node_busy", where, int(not all(fillers))
    yield "mux_node_filled", where, int(any(fillers))
    usage = seen.get("usage", {})
    for name, key in (("", "seconds"), ("job_", "jobs_s"), ("filler_", "fillers_s")):
        yield f"mux_node_{name}seconds", where, usage.get(key)
    yield "mux_node_queue_length", where, len(seen.get("queue", ()))
    for key in ("bytes", "peak_bytes", "usd_per_hour"):
        yield f"mux_node_{key}", where, seen.get(key)
    for key in ("fenced", "draining"):
        yield f"mux_node_{key}", where, int(bool(seen.get(key)))
    host_memory = seen.get("host_memory", {})
    yield "mux_node_host_capacity_bytes", where, host_memory.get("capacity")
    for job, held in host_memory.get("jobs", {}).items():
        yield "mux_node_host_bytes", where | {"job": job}, held["counted"]
        for kind, num_bytes in held["measured"].items():
            yield "mux_node_host_measured_bytes", where | {"job": job, "kind": kind, "source": held["source"]}, num_bytes
    for holder in seen.get("holders", ()):
        yield "mux_lease_held_seconds", where | _lease(holder), holder.get("held_s")
    for waiting in seen.get("queue", ()):
        yield "mux_lease_waited_seconds", where | _lease(waiting), waiting.get("waited_s")


def _lease(about: Mapping[str, Any]) -> dict[str, str]:
    return {"job": about.get("job", ""), "phase": about.get("phase", "")}


def _host(where: dict[str, str], about: Mapping[str, Any]) -> Iterator[Sample]:
    yield "mux_host_agent_up", where, {"heard": 1, "gone": 0}.get(about.get("agent", ""))
    yield "mux_host_agent_age_seconds", where, about.get("age_s")
    yield "mux_host_memory_free_bytes", where, about.get("memory_free")
    yield "mux_host_memory_bytes", where, about.get("memory_total")
    yield "mux_host_device_bytes", where | {"of": "jobs"}, about.get("device_bytes")
    yield "mux_host_device_bytes", where | {"of": "others"}, about.get("device_bytes_of_others")


def _job(labels: dict[str, str], about: Mapping[str, Any]) -> Iterator[Sample]:
    yield "mux_job_state", labels | {"state": about.get("state", "")}, 1
    yield "mux_job_step", labels, about.get("step")
    yield "mux_job_steps_done", labels, about.get("steps_done")
    done, total = about.get("progress") or (None, None)
    if total:
        yield "mux_job_progress", labels, done / total
    for name, value in (about.get("metrics") or {}).items():
        yield "mux_job_metric", labels | {"name": name}, value
