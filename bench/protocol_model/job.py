"""A job's processes in the made world: a driver around the real conversation, and an engine behind the real fence.

The driver does what `client.Mux` and `trainer/phases.py` do, with a clock that the world moves. The engine is a process of
its own: it goes on when its driver is stopped or killed, until the coordinator or an operator ends it. Made by schedules.py;
pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bench.protocol_model.coordinator import HOST, CoordinatorProcess
from bench.protocol_model.world import Wire, World
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.conversation import REGISTER, Conversation
from verl_mux.coordinator.bus.fence import Fence, Fenced
from verl_mux.coordinator.bus.members import Member

TICK_S = 0.25
_GOODBYE_S = 2.0
_RELEASE_S = 30.0
_Condition = Callable[[], bool]


class Lost(Exception):
    """The coordinator said that the job has no leases any more."""


class Engine:
    """Uses nodes under a token, as its driver says. `unchecked`: a planted fault, its fence lets everything pass."""

    def __init__(self, world: World, job: str, unchecked: bool) -> None:
        self._world, self._job, self._unchecked = world, job, unchecked
        self.fence = Fence()
        self.lives = True
        self.nodes: list[str] = []
        self.is_awake = False

    def wake(self, token: int, nodes: list[str]) -> None:
        if self.lives and self.map_memory(token):
            self.nodes, self.is_awake = list(nodes), True
            for node in nodes:
                self._world.begins_to_use(self._job, node)

    def map_memory(self, token: int) -> bool:
        """False: the fence refused it."""
        try:
            self.fence.enter(token)
        except Fenced:
            return self._unchecked
        return True

    def sleep(self) -> None:
        self.leave(self.nodes)
        self.is_awake = False
        self.fence.shut()

    def leave(self, nodes: list[str]) -> None:
        for node in list(nodes):
            self._world.uses_no_more(self._job, node)
        self.nodes = [node for node in self.nodes if node not in nodes]

    def end(self) -> None:
        self.lives = False
        self.sleep()


class JobProcess:
    """Starts when made. `says_all`: it sends every message there is."""

    def __init__(self, world: World, coordinator: CoordinatorProcess, number: int, nodes: dict[str, list[str]], steps: int,
                 lease_timeout: float, planted: str = "", says_all: bool = False) -> None:  # fmt: skip
        self._world, self._coordinator, self._nodes, self._steps = world, coordinator, nodes, steps
        self._lease_timeout, self._says_all, self._planted = lease_timeout, says_all, planted
        self.name, self.number = f"j{number}", number
        self.host = HOST if world.rng.random() < 0.7 else "elsewhere"
        self._driver_pid, self._engine_pid = 1000 + 10 * number, 1000 + 10 * number + 1
        self._where: dict[str, Any] = {"host": self.host, "pid": self._driver_pid, "started": 1, "boot": "b", "nodes": nodes}
        self.uid = f"{self.name}:1"
        self.talk = Conversation({"job": self.name, "uid": self.uid, "client": f"{self.name}-c1"}, self._where)
        self.engine = Engine(world, self.name, unchecked=planted == "token unchecked")
        self.driver_lives, self.evicted, self.has_finished = True, False, False
        self._stopped_until = 0.0
        self._while_stopped: list[m.Message] = []
        self._token: int | None = None
        self._is_fenced = False
        self._up, self._down = Wire(world), Wire(world)
        self._heard_at = coordinator.running_time()  # by the coordinator, in the time for which that ran
        self._was_silent = False
        self._waits_for: _Condition = lambda: True
        self._life = self._live()
        coordinator.jobs[self.uid] = self
        world.later(0.0, self._tick)

    def members(self) -> list[Member]:
        """The processes that live, as an agent on this host sees them."""
        alive = [self._driver_pid] * self.driver_lives + [self._engine_pid] * self.engine.lives
        return [Member(self.host, pid, 1, "b") for pid in alive]

    # --- faults ---

    def kill(self) -> None:
        """The driver only; its engine follows soon, or not at all by itself."""
        if self.driver_lives:
            self._world.fault("driver killed")
            self.evicted = True
            self.end_process(self._driver_pid)
            if self.host != HOST or self._world.rng.random() < 0.5:
                self._world.later(self._world.rng.uniform(0.0, 10.0), self.engine.end)

    def stop(self, seconds: float) -> None:
        if self.driver_lives:
            self._world.fault("driver stopped")
            self._stopped_until = self._world.now + seconds
            self._world.later(seconds, self._go_on)

    def cut(self, seconds: float) -> None:
        if self.driver_lives:
            self._world.fault("network cut")
            self._up.cut(seconds)
            self._down.cut(seconds)

    def end_process(self, pid: int) -> None:
        if pid == self._driver_pid:
            self.driver_lives = False
        else:
            self.engine.end()

    # --- the driver's threads ---

    @property
    def _is_running(self) -> bool:
        return self.driver_lives and self._world.now >= self._stopped_until

    def _go_on(self) -> None:
        if not self._is_running:
            return
        if self._world.rng.random() < 0.5:  # the thread that works may be faster than those that listen and beat
            self._advance()
        came, self._while_stopped = self._while_stopped, []
        for message in came:
            self._hear(message)

    def _tick(self) -> None:
        if not self.driver_lives:
            return
        if self._is_running:
            self.talk.tick(self._world.now)
            self._watch_fence()
            self._send()
            self._advance()
        self._world.later(TICK_S, self._tick)

    def _hear(self, message: m.Message) -> None:
        if not self.driver_lives:
            return
        if not self._is_running:
            self._while_stopped.append(message)
            return
        self.talk.receive(message, self._world.now)
        self._send()
        self._advance()

    def _send(self) -> None:
        for message in self.talk.outgoing():
            sent: m.FromJob = message
            self._up.send(lambda sent=sent: self._coordinator.receive(sent, self._reply, self._was_heard))  # type: ignore[misc]

    def _reply(self, message: m.Message) -> None:
        self._down.send(lambda: self._hear(message))

    def _was_heard(self) -> None:
        self._note_silence()
        self._heard_at = self._coordinator.running_time()

    def _note_silence(self) -> None:
        if self._coordinator.running_time() - self._heard_at > self._lease_timeout:
            self._was_silent = True

    def _watch_fence(self) -> None:
        """The thread that `Mux.guard` starts."""
        usable = self.talk.may_use(self._world.now)
        if self._token in self.talk.held and not usable and not self._is_fenced:
            self._is_fenced = True
            self._world.later(self._world.rng.uniform(0.0, 0.15) * self._lease_timeout, self._fall_asleep)
        elif self._is_fenced and usable:
            self._is_fenced = False
            token = self._token
            if token in self.talk.held and self.engine.lives and token is not None:
                self.engine.fence.reopen(token)
                self.engine.wake(token, self.talk.held[token].nodes)

    def _fall_asleep(self) -> None:
        if self._is_fenced:
            self.engine.sleep()

    # --- what the trainer does ---

    def _advance(self) -> None:
        try:
            while self._is_running and self._waits_for():
                self._waits_for = next(self._life)
                self._send()
        except StopIteration:
            self.has_finished = True
            self._world.tell(f"{self.name} has finished")
            self._exit()
        except Lost as lost:
            self._was_lost(str(lost))

    def _was_lost(self, why: str) -> None:
        self._note_silence()
        self._world.tell(f"{self.name} lost its lease: {why}")
        if not self._was_silent and not self.evicted:
            self._world.violated("lease lost", f"{self.name} was heard in time, and hears: {why}")
        self._exit()

    def _exit(self) -> None:
        self.engine.end()
        self.end_process(self._driver_pid)

    def _live(self) -> Iterator[_Condition]:
        yield from self._register()
        for step in range(1, self._steps + 1):
            for phase in ("rollout", "train"):
                yield from self._run_phase(phase, step)
            if self._says_all:
                self.talk.send(m.StepReport, step=step, metrics={})
        if self._says_all:
            yield from self._visit()
        if self._says_all and self.number % 2:
            self.talk.fail("a planned end")
        else:
            self.talk.leave()
        at = self._world.now + _GOODBYE_S
        yield lambda: self.talk.ended is not None or self._world.now >= at

    def _register(self) -> Iterator[_Condition]:
        while True:
            self.talk.register(self._world.now)
            yield lambda: self.talk.is_over(REGISTER)
            answer = self.talk.take_answer(REGISTER)
            if isinstance(answer, m.Registered):
                return
            if isinstance(answer, m.Queued):
                continue
            if not isinstance(answer, m.Refused) or not answer.retry:
                raise Lost(f"not registered: {answer} {self.talk.ended}")
            yield from self._pass(0.2)

    def _run_phase(self, phase: str, step: int) -> Iterator[_Condition]:
        rng = self._world.rng
        key = f"{self.name}.{phase}.{step}"
        if self._world.chance(0.05) or (self._says_all and phase == "rollout"):
            yield from self._change_ones_mind(f"{key}.first", phase, step)
        self.talk.request(key, phase, step, self._nodes[phase])
        yield lambda: self.talk.is_over(key)
        self._raise_if_over()
        grant = self.talk.take_answer(key)
        if not isinstance(grant, m.LeaseGrant):
            raise Lost(f"refused: {grant}")
        token = grant.token
        yield from self._until_usable(token)
        self._token = token
        self.engine.wake(token, grant.nodes)
        self._call_again_later(token)
        if self._says_all:
            self._tell_all(token, grant.nodes[0])
        yield from self._work(token, rng.uniform(0.1, 4.0))
        if len(grant.nodes) > 1 and (self._says_all or rng.random() < 0.5):
            self.engine.leave(grant.nodes[1:])
            self.talk.shrink(token, grant.nodes[1:])
            yield from self._work(token, rng.uniform(0.1, 2.0))
        self.engine.sleep()
        self._token = None
        released, at = self.talk.release(token), self._world.now + _RELEASE_S
        yield lambda: self.talk.is_over(released) or self._world.now >= at
        if isinstance(answer := self.talk.take_answer(released), m.LeaseLost):
            raise Lost(answer.reason)
        self._raise_if_over()

    def _change_ones_mind(self, key: str, phase: str, step: int) -> Iterator[_Condition]:
        self.talk.request(key, phase, step, self._nodes[phase])
        yield from self._pass(self._world.rng.uniform(0.0, 1.0))
        self.talk.cancel(key)

    def _tell_all(self, token: int, node: str) -> None:
        self.talk.members = self.members()
        self.talk.send(m.MemberReport, members=self.talk.members)
        self.talk.send(m.MemoryReport, node=node, tags={"weights": 1})
        self.talk.send(m.HostReport, node=node, bytes={"private": 1})
        self.talk.send(m.PhaseNote, note="wake")
        self.talk.send(m.Progress, done=1, total=2, token=token)

    def _visit(self) -> Iterator[_Condition]:
        """One more client of the job comes and goes, over a connection of its own, while this one waits."""
        visitor = Conversation({**self.talk.sender, "client": f"{self.name}-d"}, self._where)
        up, down = Wire(self._world), Wire(self._world)

        def reply(message: m.Message) -> None:
            down.send(lambda: visitor.receive(message, self._world.now))

        def tick() -> bool:
            visitor.tick(self._world.now)
            for message in visitor.outgoing():
                up.send(lambda sent=message: self._coordinator.receive(sent, reply, lambda: None))  # type: ignore[misc]
            return visitor.ended is not None

        visitor.register(self._world.now)
        yield lambda: tick() or visitor.is_over(REGISTER)
        visitor.leave()
        yield tick

    def _work(self, token: int, seconds: float) -> Iterator[_Condition]:
        yield from self._pass(seconds)
        yield from self._until_usable(token)

    def _until_usable(self, token: int) -> Iterator[_Condition]:
        yield lambda: self.talk.may_use(self._world.now) or token not in self.talk.held
        self._raise_if_over()
        if token not in self.talk.held:
            raise Lost(self.talk.lost.get(token, "it is not held"))
        self._watch_fence()

    def _pass(self, seconds: float) -> Iterator[_Condition]:
        at = self._world.now + seconds
        yield lambda: self._world.now >= at

    def _raise_if_over(self) -> None:
        if self.talk.ended is not None:
            raise Lost(self.talk.ended)

    def _call_again_later(self, token: int) -> None:
        """A call that maps memory is long on its way to the engine."""

        def arrive() -> None:
            is_current = self._token == token and self.talk.may_use(self._world.now)
            if self.engine.lives and self._is_running and not is_current and not self._is_fenced_but_awake():
                self._world.faults["stale calls"] += 1
                if self.engine.map_memory(token):
                    self._world.violated("mapped after expiry", f"{self.name} under token {token}")

        self._world.later(self._world.rng.uniform(0.0, 3.0) * self._lease_timeout, arrive)

    def _is_fenced_but_awake(self) -> bool:
        """It is being put to sleep, which its lease leaves time for."""
        return self._token is not None and self.engine.is_awake
