"""`verl-mux agent`: look at this host for a coordinator, report, do what the answer says, and again.

Runs as one process a host and PID namespace; called by cli.py. Reads processes, their environments and memory; ends marked
processes of its own user. An answer that does not come is not waited for long: the next report asks the same again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from verl_mux.coordinator.bus import members
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.curve_keys import AGENT, ClientKeys, for_address
from verl_mux.coordinator.bus.link import Link
from verl_mux.coordinator.bus.members import HOST, UID_VARIABLE, Marked
from verl_mux.coordinator.bus.messages import (
    MOST_ADDRESSES,
    MOST_PROCESSES,
    AgentAnswer,
    AgentReport,
    Holder,
    Member,
    NodeHere,
    Source,
)
from verl_mux.coordinator.commands import DEFAULT_ADDRESS, Address, Keys, make_log_folder
from verl_mux.errors import UserError
from verl_mux.platform.choose import accelerator_present, cpu_package_missing, cpu_part
from verl_mux.platform.host_memory import process_bytes, room
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.eventlog.log import NULL_LOG, EventLog

log = logging.getLogger(__name__)

# Host memory: the kernel goes through all pages of a process for it, a second for hundreds of GB.
_EVERY_S = 10.0
_ANSWER_WITHIN_S = 2.0
_WITHOUT_ANSWER_S = 0.5
_POLL_S = 0.05
_HIGHEST_BYTES = 2**43  # of one message's field


class MappedLog:
    """A line of the event log for each change of what a process holds: `log` after each report, with the newest answer."""

    def __init__(self, event_log: Any) -> None:
        self._log = event_log
        self._before: dict[tuple[str, int, str], int] = {}  # bytes by uid, pid and node
        self._names: dict[str, str] = {}

    def log(self, report: AgentReport, answer: AgentAnswer | None, seen_at: float) -> None:
        """`seen_at`: epoch seconds of the look. A process whose job the coordinator does not know has an empty name."""
        self._names.update(answer.jobs if answer else {})
        held = {(it.uid, it.member.pid, node): num for it in report.holders for node, num in it.bytes.items() if num}
        for uid, pid, node in dict.fromkeys([*self._before, *held]):
            before, now = (known.get((uid, pid, node), 0) for known in (self._before, held))
            if before != now:
                lease = answer.nodes.get(node, NodeHere()) if answer else NodeHere()
                about = {"host": report.host.name, "node": node, "job": self._names.get(uid, ""), "pid": pid, "bytes": now}
                about |= {"before": before, "leased_to": lease.job, "token": lease.token, "source": report.source}
                self._log.log(events.DEVICE_MEMORY, extra=about, timestamp=seen_at)
        self._before = held
        self._names = {uid: self._names[uid] for uid, _, _ in held if uid in self._names}


_Held = dict[Member, dict[str, int]]


class HostMemory:
    """Host memory of processes, read in a thread every 10 s; `held` may be called at any time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verl-mux-host-memory")
        self._reading: Future[_Held] | None = None
        self._began = float("-inf")
        self._held: _Held = {}

    def held(self, processes: Sequence[Member]) -> _Held:
        """By process, as read last, by kind; those that came since are not in it."""
        if self._reading is not None and self._reading.done():
            self._held, self._reading = self._reading.result(), None
        if self._reading is None and time.monotonic() - self._began > _EVERY_S:
            self._began = time.monotonic()
            self._reading = self._thread.submit(lambda: {process: process_bytes(process.pid) for process in processes})
        return self._held


# A node whose name is not known: of a host that is part of none, or before the coordinator has answered.
NO_NODE = ""


class Held(NamedTuple):
    """Bytes by pid and node, and those that no process is known for, by node."""

    by_pid: dict[int, dict[str, int]]
    others: dict[str, int]


class Devices:
    """What device memory the processes of this host hold; this one cannot say."""

    source: Source = "unknown"

    def held(self, nodes: Mapping[str, NodeHere]) -> Held:
        return Held({}, {})


class Ledger(Devices):
    """Raises UserError where verl-mux-cpu, which keeps it, is not installed."""

    source: Source = "ledger"

    def __init__(self) -> None:
        self._accounts = cpu_part("ledger").accounts

    def held(self, nodes: Mapping[str, NodeHere]) -> Held:
        only = next(iter(nodes)) if len(nodes) == 1 else NO_NODE
        by_pid = {}
        for path, account in self._accounts():
            if account.lives:
                by_pid[account.pid] = {account.node or only: sum(account.tags.values())}
            else:
                with contextlib.suppress(OSError):  # it will not be read again
                    path.unlink()
        return Held(by_pid, {})


class Nvml(Devices):
    """Raises whatever its library does where that is not there, or cannot begin."""

    source: Source = "nvml"

    def __init__(self) -> None:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        self._cards = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]

    def held(self, nodes: Mapping[str, NodeHere]) -> Held:
        by_pid: defaultdict[int, dict[str, int]] = defaultdict(dict)
        others: dict[str, int] = {}
        for index, card in enumerate(self._cards):
            node = next((name for name, here in nodes.items() if here.gpu_ids is None or index in here.gpu_ids), NO_NODE)
            known = 0
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(card):
                used = process.usedGpuMemory or 0  # None: the driver does not tell, as in a container without its rights
                known += used
                by_pid[process.pid][node] = by_pid[process.pid].get(node, 0) + used
            used = self._nvml.nvmlDeviceGetMemoryInfo(card).used
            others[node] = others.get(node, 0) + max(used - known, 0)
        return Held(dict(by_pid), others)


def open_devices(wanted: str) -> Devices:
    """`wanted`: auto, nvml, ledger or none. Raises UserError for another word, and for NVML that is asked for and not there."""
    if wanted in ("auto", "nvml"):
        try:
            return Nvml()
        except Exception as error:  # no package, no driver, no device: its words for each are its own
            if wanted == "nvml":
                raise UserError(f"--devices nvml: {error}; it takes NVIDIA's driver and `pip install nvidia-ml-py`") from error
    if wanted not in ("auto", "nvml", "ledger", "none"):
        raise UserError(f"--devices is {wanted!r}; allowed: auto, nvml, ledger, none")
    if wanted == "ledger" or (wanted == "auto" and not accelerator_present() and not cpu_package_missing()):
        return Ledger()
    return Devices()


class Agent:
    """made -> `run(enough)`. Raises UserError when the coordinator does not take it from the start."""

    def __init__(self, address: str, keys: ClientKeys | None, devices: Devices, event_log: Any) -> None:
        self._address, self._keys, self._devices, self._log = address, keys, devices, event_log
        self._name = f"agent-{uuid.uuid4().hex}"
        self._host = m.HostName(members.HOST, members.names_of_this_host()[1 : 1 + MOST_ADDRESSES], members.BOOT, members.SPACE)
        self._marked, self._mapped = Marked(), MappedLog(event_log)
        self._heard: queue.SimpleQueue[m.AnyMessage] = queue.SimpleQueue()
        self._answer: m.AgentAnswer | None = None
        self._number = 0
        self._host_memory = HostMemory()
        self._killed: set[m.Member] = set()  # logged once, ended again until it is gone

    def run(self, enough: threading.Event) -> None:
        self._link = link = Link(self._address, self._name, self._heard.put, self._keys, patience_s=0.0)
        link.start()
        try:
            while not enough.is_set():
                seen_at = time.time()
                report = self.look()
                link.send(report)
                answer = self._answer_to(report, enough)
                self._answer = answer or self._answer
                self._mapped.log(report, self._answer, seen_at)
                if answer is not None:
                    self._end(answer.end)
                enough.wait(answer.again_s if answer else _WITHOUT_ANSWER_S)
        finally:
            link.close()

    # --- looking ---

    def look(self) -> m.AgentReport:
        answer, memory = self._answer, room()
        looks = self._marked.look(answer.look_for) if answer and answer.look_for else []
        marked = {member: uid for uid, processes in self._marked.find(fresh=False).items() for member in processes}
        held = self._devices.held(answer.nodes if answer else {})
        pids, host, others = {member.pid for member in marked}, self._host_memory.held(list(marked)), dict(held.others)
        for pid, by_node in held.by_pid.items():
            for node, num_bytes in by_node.items() if pid not in pids else ():
                others[node] = others.get(node, 0) + num_bytes
        self._number += 1
        return m.AgentReport(
            agent=self._name,
            number=self._number,
            host=self._host,
            source=self._devices.source,
            looks=looks,
            dead=[driver for driver in (answer.drivers if answer else []) if not members.is_alive(driver)][:MOST_PROCESSES],
            holders=[
                Holder(uid, member, held.by_pid.get(member.pid, {}), host.get(member, {})) for member, uid in marked.items()
            ][:MOST_PROCESSES],
            others=others,
            memory_free=min(memory.available, _HIGHEST_BYTES),
            memory_total=min(memory.total, _HIGHEST_BYTES),
            memory_source=memory.source,
        )

    # --- doing ---

    def _end(self, uids: list[str]) -> None:
        """Only processes of this user that carry the mark of such a job, or did when they were seen first: `members.kill` looks
        again right before."""
        marked = self._marked.find(fresh=True) if uids else {}
        for uid in uids:
            for member in marked.get(uid, ()):
                if members.kill(member, uid, was_marked=True) and member not in self._killed:
                    job = self._answer.jobs.get(uid, "") if self._answer else ""
                    self._killed.add(member)
                    log.warning("killed pid %d, which outlived job %r", member.pid, job)
                    self._log.log(events.AGENT_KILLED, extra={"host": self._host.name, "job": job, "pid": member.pid})

    def _answer_to(self, report: m.AgentReport, enough: threading.Event) -> m.AgentAnswer | None:
        """None: no answer came in time. Raises UserError where the first answer is a refusal."""
        deadline = time.monotonic() + _ANSWER_WITHIN_S
        while time.monotonic() < deadline and not enough.is_set():
            try:
                answer = self._heard.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if isinstance(answer, m.AgentAnswer) and answer.number == report.number:
                return answer
            if isinstance(answer, m.Refused):
                reason = self._link.refused or f"the coordinator at {self._address} refuses: {answer.reason}"
                if self._answer is None:
                    raise UserError(reason)
                log.warning("%s", reason)
        return None


def agent(
    coordinator: Address = DEFAULT_ADDRESS,
    keys: Keys = None,
    log_dir: Annotated[Path | None, typer.Option(help="Folder for its log: which process held which memory when.")] = None,
    devices: Annotated[
        str, typer.Option(help="Source of the device memory that processes hold: auto, nvml, ledger (no device) or none.")
    ] = "auto",
) -> None:
    """Look at this host for a coordinator, and end what outlives its job, until interrupted."""
    opened = open_devices(devices)
    if log_dir is not None:
        make_log_folder(log_dir / HOST)
    _take_off_the_mark()
    event_log = EventLog(log_dir / HOST, role="agent", job="agent") if log_dir is not None else NULL_LOG
    enough = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: enough.set())
    print(f"verl-mux agent of {HOST} for {coordinator}; device memory: {opened.source}", file=sys.stderr, flush=True)
    try:
        Agent(coordinator, for_address(coordinator, keys, AGENT), opened, event_log).run(enough)
    finally:
        event_log.close()


def _take_off_the_mark() -> None:
    """Started by a job, it would count as a process of that job: what a process was started with, only a new start changes."""
    if os.environ.pop(UID_VARIABLE, None) is not None:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], dict(os.environ))
