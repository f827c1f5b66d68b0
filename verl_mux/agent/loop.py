"""An agent at work: look, report, do what the answer says, and again. One thread; one question is open at a time.

An answer that does not come is not waited for long: the next report asks the same again, with a newer look. While no coordinator
is there the agent goes on looking and logging, and ends nothing.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from typing import Any

import psutil
import zmq

from verl_mux.agent.devices import Devices
from verl_mux.agent.host_memory import HostMemory
from verl_mux.agent.mapped import MappedLog
from verl_mux.agent.processes import Marked
from verl_mux.coordinator.bus import members
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.curve_keys import ClientKeys
from verl_mux.coordinator.bus.link import Handshake, connect_to, dealer
from verl_mux.coordinator.bus.messages import MOST_ADDRESSES, Holder
from verl_mux.errors import UserError
from verl_mux.profiling.eventlog import events

log = logging.getLogger(__name__)

_ANSWER_WITHIN_S = 2.0
_WITHOUT_ANSWER_S = 0.5
# Longer than libzmq's own tries to connect: where it has given up, as after a refused key, a new socket tries.
_NEW_CONNECTION_AFTER_S = 5.0
_HIGHEST_BYTES = 2**43  # of one message's field


class Agent:
    """made -> `run(enough)`. Raises UserError when the coordinator does not take it from the start."""

    def __init__(self, address: str, keys: ClientKeys | None, devices: Devices, event_log: Any) -> None:
        self._address, self._keys, self._devices, self._log = address, keys, devices, event_log
        self._name = f"agent-{uuid.uuid4().hex}"
        self._host = m.HostName(members.HOST, members.names_of_this_host()[1 : 1 + MOST_ADDRESSES], members.BOOT, members.SPACE)
        self._marked, self._mapped = Marked(), MappedLog(event_log)
        self._answer: m.AgentAnswer | None = None
        self._number = 0
        self._host_memory = HostMemory()
        self._has_been_answered = False
        self._killed: set[m.Member] = set()  # said once, done until it is gone

    def run(self, enough: threading.Event) -> None:
        with zmq.Context() as context:
            self._connect(context)
            heard = time.monotonic()
            try:
                while not enough.is_set():
                    seen_at = time.time()
                    report = self.look()
                    answer = self._ask(report, enough)
                    if answer is not None:
                        self._answer, heard = answer, time.monotonic()
                    self._mapped.tell(report, self._answer, seen_at)
                    if answer is not None:
                        self._end(answer.end)
                    elif time.monotonic() - heard > _NEW_CONNECTION_AFTER_S:
                        self._disconnect()
                        self._connect(context)
                        heard = time.monotonic()
                    enough.wait(answer.again_s if answer else _WITHOUT_ANSWER_S)
            finally:
                self._disconnect()

    # --- looking ---

    def look(self) -> m.AgentReport:
        answer, memory = self._answer, psutil.virtual_memory()
        looks = self._marked.look(answer.look_for) if answer and answer.look_for else []
        marked = self._marked.find(fresh=False)
        held = self._devices.held(answer.nodes if answer else {})
        carrying = {member.pid for found in marked.values() for member in found}
        host, others = self._host_memory.of([member for found in marked.values() for member in found]), dict(held.others)
        for pid, by_node in held.by_pid.items():
            for node, num_bytes in by_node.items() if pid not in carrying else ():
                others[node] = others.get(node, 0) + num_bytes
        self._number += 1
        return m.AgentReport(
            agent=self._name,
            number=self._number,
            host=self._host,
            source=self._devices.source,
            looks=looks,
            dead=[driver for driver in (answer.drivers if answer else []) if not members.is_alive(driver)],
            holders=[
                Holder(uid, member, held.by_pid.get(member.pid, {}), host.get(member, {}))
                for uid, found in marked.items()
                for member in found
            ],
            others=others,
            memory_free=min(memory.available, _HIGHEST_BYTES),
            memory_total=min(memory.total, _HIGHEST_BYTES),
        )

    # --- doing ---

    def _end(self, uids: list[str]) -> None:
        """Only processes that carry the mark of such a job, or did when they were seen first, and of this user: `members.kill`
        looks again right before."""
        marked = self._marked.find(fresh=True) if uids else {}
        for uid in uids:
            for member in marked.get(uid, ()):
                if members.kill(member, uid, was_marked=True) and member not in self._killed:
                    job = self._answer.jobs.get(uid, "") if self._answer else ""
                    self._killed.add(member)
                    log.warning("killed pid %d, which outlived job %r", member.pid, job)
                    self._log.log(events.AGENT_KILLED, extra={"host": self._host.name, "job": job, "pid": member.pid})

    # --- talking ---

    def _connect(self, context: zmq.Context) -> None:
        self._socket = dealer(context, self._name, self._keys, immediate=True)
        self._handshake = Handshake(self._socket, self._address, self._keys)
        try:
            connect_to(self._address, self._socket)
        except UserError:
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        self._handshake.close()
        self._socket.close(linger=0)

    def _ask(self, report: m.AgentReport, enough: threading.Event) -> m.AgentAnswer | None:
        """None: nobody answers. Raises UserError where the first answer is a refusal."""
        deadline = time.monotonic() + _ANSWER_WITHIN_S
        sent = False
        while time.monotonic() < deadline and not enough.is_set():
            if not sent:
                sent = self._send(report)
            if self._socket.poll(50):
                answer = self._read()
                if isinstance(answer, m.AgentAnswer) and answer.number == report.number:
                    self._has_been_answered = True
                    return answer
            self._look_at_handshake()
        return None

    def _send(self, report: m.AgentReport) -> bool:
        try:
            self._socket.send(m.encode(report), zmq.NOBLOCK)
        except zmq.Again:  # nobody is there yet
            return False
        return True

    def _read(self) -> m.AnyMessage | None:
        try:
            message = m.decode(self._socket.recv())
        except m.Unreadable as error:
            log.warning("the coordinator sent what this agent cannot read: %s", error)
            return None
        if isinstance(message, m.Refused):
            self._refused(f"the coordinator at {self._address} refuses: {message.reason}")
        return message

    def _look_at_handshake(self) -> None:
        if reason := self._handshake.refusal():
            self._refused(reason)

    def _refused(self, reason: str) -> None:
        if not self._has_been_answered:
            raise UserError(reason)
        log.warning("%s", reason)
