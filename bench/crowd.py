"""Many jobs in one process: the product's conversation, outbox and socket for each, and one loop instead of a thread each.

Runs in the bench's process; called by load.py and hostile.py; touches its sockets.
"""

from __future__ import annotations

import random
import select
import time
from collections import defaultdict

import msgspec
import zmq

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.conversation import BEAT_EVERY_S, REGISTER, Conversation, Sender
from verl_mux.coordinator.bus.curve_keys import JOB, ClientKeys, for_address
from verl_mux.coordinator.bus.link import Outbox, connect_to, dealer
from verl_mux.coordinator.bus.members import this_process


class Member:
    """One job. `heard`: when the coordinator last said anything to it."""

    def __init__(self, context: zmq.Context, address: str, keys: ClientKeys | None, name: str, node: str) -> None:
        sender: Sender = {"job": name, "uid": f"{name}:bench", "client": f"{name}-1"}
        about = {**msgspec.structs.asdict(this_process()), "nodes": {"rollout": [node]}}
        self.node = node
        self.talk = Conversation(sender, about)
        self.outbox = Outbox()
        self.socket = dealer(context, sender["client"], keys, immediate=True)
        connect_to(address, self.socket)
        self.asked, self.heard = 0, 0.0

    def pump(self) -> None:
        """Sends and reads all that can be; one without the other would lose the socket's wake-up."""
        while self._send_and_read():
            pass

    def _send_and_read(self) -> bool:
        """True: something was read, to which there may be something to say."""
        read = False
        for said in self.talk.outgoing():
            self.outbox.put(said)
        while (message := self.outbox.take()) is not None:
            try:
                self.socket.send(m.encode(message), zmq.NOBLOCK)
            except zmq.Again:
                self.outbox.put_back(message)
                break
        while True:
            try:
                answer = m.decode(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return read
            self.heard, read = time.monotonic(), True
            self.talk.receive(answer, self.heard)

    def ask(self) -> None:
        self.asked += 1
        self.talk.request(f"{self.asked}", "rollout", self.asked, [self.node])


class Crowd:
    """Two jobs to each node: one holds it, the other waits for it."""

    def __init__(self, address: str, nodes: list[str], seed: int = 0) -> None:
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 4 * len(nodes) + 10)
        self.nodes = nodes
        self.on: dict[str, list[Member]] = defaultdict(list)
        keys = for_address(address, None, JOB)
        self.members = [Member(self.context, address, keys, f"job{i}", nodes[i % len(nodes)]) for i in range(2 * len(nodes))]
        self._epoll = select.epoll()
        self._by_descriptor = {}
        for member in self.members:
            self.on[member.node].append(member)
            self._epoll.register(descriptor := member.socket.fileno(), select.EPOLLIN)
            self._by_descriptor[descriptor] = member
        self._chance = random.Random(seed)
        self._due = sorted((time.monotonic() + self._chance.random(), i) for i in range(len(self.members)))
        self.grants_s: list[float] = []
        self._released: dict[str, tuple[float, Member]] = {}

    def register(self) -> None:
        for member in self.members:
            member.talk.register(time.monotonic())
            member.pump()
        self.run_until(lambda: all(member.talk.registered for member in self.members))
        for member in self.members:
            member.talk.take_answer(REGISTER)
            member.ask()
            member.pump()
        self.run_until(lambda: all(any(member.talk.held for member in self.on[node]) for node in self.nodes))

    def run(self, seconds: float, phases_per_second: float = 0.0) -> None:
        """Each phase ends on a random node: its holder gives it back and asks again, and the other job gets it."""
        until = time.monotonic() + seconds
        next_phase = time.monotonic()
        while (now := time.monotonic()) < until:
            if phases_per_second and now >= next_phase:
                next_phase += 1 / phases_per_second
                self._hand_over(self._chance.choice(self.nodes))
            self._once(min(until, next_phase) if phases_per_second else until)

    def run_until(self, condition, seconds: float = 120.0) -> float:
        """Returns how long it took."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"not within {seconds:g} s")
            self._once(time.monotonic() + 0.05)
        return time.monotonic() - began

    def close(self) -> None:
        self.context.destroy(linger=0)

    def _hand_over(self, node: str) -> None:
        holder = next((member for member in self.on[node] if member.talk.held), None)
        if holder is None or node in self._released:
            return  # its last hand-over is still under way
        (waiter,) = (member for member in self.on[node] if member is not holder)
        self._released[node] = (time.perf_counter(), waiter)
        holder.talk.release(next(iter(holder.talk.held)), wanted=False)
        holder.ask()
        holder.pump()

    def _once(self, until: float) -> None:
        first = self._due[0][0]
        for descriptor, _ in self._epoll.poll(max(0.0, min(until, first) - time.monotonic())):
            self._read(self._by_descriptor[descriptor])
        while self._due[0][0] <= time.monotonic():
            at, number = self._due.pop(0)
            member = self.members[number]
            member.talk.tick(time.monotonic())
            self._read(member)
            self._due.append((max(at + BEAT_EVERY_S, time.monotonic()), number))

    def _read(self, member: Member) -> None:
        member.pump()
        if member.node in self._released and self._released[member.node][1] is member and member.talk.held:
            member.talk.take_answer(str(member.asked))
            self.grants_s.append(time.perf_counter() - self._released.pop(member.node)[0])
