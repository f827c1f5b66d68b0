"""One run of a workload under one placement policy, phase by phase.

The policy decides, with the very code the coordinator calls; this module lets time pass, carries out what was decided,
and keeps the books: USD, node-seconds held and busy, and how long every job took.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from research.outcome import Finished, Ledger, Run, Span
from research.workload.workload import Arrival, Phases
from verl_mux.placement.estimator import LEAST, Observed, corrected
from verl_mux.placement.feasibility import PHASES, Progress
from verl_mux.placement.group_run import LOADING, ROLLOUT, TRAIN, GroupRun, Member
from verl_mux.placement.groups import isolated_usd
from verl_mux.placement.model import ORDERS, OWN_NODES, Cluster, Group, JobSpec, Pin
from verl_mux.placement.planner import ASK_AGAIN_S, Again, Answer, Arrive, Correct, Leave, Question

_PHASE_NAMES = {number: name for name, number in PHASES.items()}


class Policy(Protocol):
    """What a replay needs of a placer: groups, and answers to Arrive, Leave and Again; of one that learns to Correct as well."""

    @property
    def groups(self) -> Mapping[str, Group]: ...

    def answer(self, question: Question, progress: Mapping[str, Progress], now: float, held: frozenset[str]) -> Answer: ...


class _Live:
    """A job that was placed: its part in a run, and the nodes it is pinned to there. Neither before it is set up. done:
    iterations of its profile that count; it then goes on where it did them, and was placed when they began."""

    __slots__ = ("arrival", "phases", "times", "member", "nodes", "done", "placed_s", "moves", "lost_s", "spec", "observed")

    def __init__(self, arrival: Arrival, placed_s: float) -> None:
        self.arrival = arrival
        self.phases = Phases(arrival.job, arrival.draws() if arrival.draws else None)
        self.times = self.phases.times()
        self.member: Member | None = None
        self.nodes: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self.done = 0
        self.placed_s = placed_s
        self.moves = 0
        self.lost_s = 0.0
        self.spec = arrival.job
        self.observed = Observed()

    def keep_profile(self) -> None:
        """It goes on where it was profiled, with what it did there."""
        self.done = self.arrival.profiled
        self.placed_s -= self.arrival.profile_s
        self.phases.begin_after(self.done)
        for iteration in range(self.done):
            self.see(iteration)

    def see(self, iteration: int) -> None:
        rollout, train = self.phases.history[iteration]
        self.observed = self.observed.seen("rollout", rollout + self.spec.sync_s).seen("train", train)


class _Running:
    """A group and its run; `dissolved` once the group has changed."""

    __slots__ = ("group", "run", "dissolved")

    def __init__(self, group: Group, now: float) -> None:
        self.group = group
        self.run = GroupRun(now)
        self.dissolved = False


class Replay:
    """One run; `run` is called once. learns: the policy learns how long phases really take, and which jobs cannot be moved now;
    jobs then also pay for their own cold start."""

    def __init__(self, arrivals: Sequence[Arrival], policy: Policy, cluster: Cluster, learns: bool = False) -> None:
        self.learns = learns
        self.actions: Counter[str] = Counter()
        self.arrivals = sorted(arrivals, key=lambda arrival: arrival.at_s)
        self.policy = policy
        self.cluster = cluster
        self.ledger = Ledger()
        self.finished: list[Finished] = []
        self.spans: list[Span] = []
        self._steps: dict[str, int] = {}
        self._live: dict[str, _Live] = {}
        self._queued: dict[str, Arrival] = {}
        self._running: dict[str, _Running] = {}
        self._bits: dict[str, int] = {}
        self._events: list[tuple[float, int, _Running]] = []
        self._serial = itertools.count()
        self._since = 0.0
        self._tick = math.inf

    def run(self) -> Run:
        coming = iter(self.arrivals)
        arrival = next(coming, None)
        while arrival or self._live:
            event = self._events[0][0] if self._events else math.inf
            if arrival and arrival.at_s <= min(event, self._tick):
                self._arrive(arrival)
                arrival = next(coming, None)
            elif self._tick <= event:
                self._follow(self._tick, self._ask(Again(), self._tick))
            else:
                self._step()
        return Run(self.finished, self.ledger, self.spans)

    def _arrive(self, arrival: Arrival) -> None:
        """It has ended already if its profile was all of it."""
        now = arrival.at_s
        if arrival.profile_s:
            self.ledger.add(arrival.profile_s, arrival.job.nodes, isolated_usd(arrival.job, self.cluster))
        live = _Live(arrival, now)
        if arrival.profiled >= arrival.iterations:
            live.keep_profile()
            self._finish(live, now)
            return
        answer = self._ask(Arrive(arrival.job), now)
        decision = answer.decision
        assert decision is not None
        if decision.outcome == "queued":
            self._queued[arrival.job.name] = arrival
        else:
            self._live[arrival.job.name] = live
        if decision.strategy == OWN_NODES[arrival.job.colocated]:
            live.keep_profile()
        self._follow(now, answer, live)

    def _step(self) -> None:
        """The next end of a phase anywhere."""
        _, _, running = heapq.heappop(self._events)
        if running.dissolved:
            return
        member, now = running.run.step(), running.run.now
        if member and member.done >= self._live[member.name].arrival.iterations:
            self._finish(self._live.pop(member.name), now)
            self._follow(now, self._ask(Leave(member.name), now))
            return
        if member is not None and self.learns:
            self._learn(member.name, now)
        if not running.dissolved:
            self._schedule(running)

    def _learn(self, name: str, now: float) -> None:
        """One more iteration of the job was seen."""
        live = self._live[name]
        live.see(live.member.done - 1 if live.member else 0)
        if (seen := corrected(live.spec, live.observed)) is not None:
            live.spec = seen
        elif live.observed.steps != LEAST:  # from here on others of its group may be moved
            return
        self._follow(now, self._ask(Correct(live.spec), now))

    def _finish(self, live: _Live, now: float) -> None:
        arrival = live.arrival
        self.finished.append(
            Finished(
                job=arrival.job.name,
                slo=arrival.job.slo,
                arrived_s=arrival.at_s - arrival.profile_s,
                placed_s=live.placed_s,
                ended_s=now,
                iterations=arrival.iterations,
                solo_s=self._start_s(arrival.job) + live.phases.solo_s(arrival.iterations),
                planned_solo_s=self._start_s(arrival.job) + arrival.iterations * arrival.job.iteration_s,
                moves=live.moves,
                lost_s=live.lost_s,
                profile_s=0.0 if live.done else arrival.profile_s,
            )
        )

    def _ask(self, question: Question, now: float) -> Answer:
        """The policy is shown what the coordinator would: nothing of a job before its first step; a job on its way is not
        moved."""
        found, away = {}, []
        for running in self._running.values():
            for member, ends in zip(running.run.members, running.run.ends, strict=True):
                if (live := self._live.get(member.name)) is None:
                    continue
                age_s, solo_s, left = now - live.placed_s, None, None
                if self.learns:
                    if member.phase == LOADING and not live.moves:
                        continue
                    away += [member.name] if member.phase == LOADING else []
                    age_s, solo_s = age_s - self._start_s(live.arrival.job), live.phases.solo_s(member.done)
                    left = live.arrival.says_left(member.done)
                running_s = ends - now
                found[member.name] = Progress(
                    age_s=age_s,
                    done=member.done,
                    phase=_PHASE_NAMES[member.phase],
                    remaining_s=max(running_s, 0.0) if running_s < math.inf else None,
                    waited_s=0.0 if running_s < math.inf else now - member.since,
                    warm=(self._warm(member, "rollout", live.nodes[0]), self._warm(member, "train", live.nodes[1])),
                    solo_s=solo_s,
                    left=left,
                )
        return self.policy.answer(question, found, now, frozenset(away))

    def _start_s(self, job: JobSpec) -> float:
        return job.cold_start_s if self.learns else 0.0

    def _warm(self, member: Member, side: str, nodes: Sequence[str]) -> tuple[str, ...]:
        return tuple(node for node in nodes if member.resident >> self._bits[f"{side} {node}"] & 1)

    def _follow(self, now: float, answer: Answer, newcomer: _Live | None = None) -> None:
        """Brings the runs in line with the policy's groups."""
        self._book(now)
        self.actions.update(action.kind for action in answer.actions)
        loads = {move.job: move.load_s for move in answer.moves}
        if newcomer is not None:
            job = newcomer.arrival.job
            loads[job.name] = 0.0 if newcomer.done else self._start_s(job)
        for move in answer.moves:
            if move.kind == "start":
                live = self._live[move.job] = _Live(self._queued.pop(move.job), now)
                loads[move.job] = self._start_s(live.arrival.job)
        groups = self.policy.groups
        ends: dict[str, float] = {}
        for name in [name for name, running in self._running.items() if groups.get(name) is not running.group]:
            running = self._running.pop(name)
            running.dissolved = True
            self._collect(running.run)
            ends.update((m.name, end) for m, end in zip(running.run.members, running.run.ends, strict=True))
        for name, group in groups.items():
            if name not in self._running:
                self._running[name] = self._set_up(group, now, ends, loads)
                self._schedule(self._running[name])
        self._steps = {member.name: member.done for running in self._running.values() for member in running.run.members}
        self._tick = now + ASK_AGAIN_S if answer.pending else math.inf

    def _set_up(self, group: Group, now: float, ends: dict[str, float], loads: dict[str, float]) -> _Running:
        running = _Running(group, now)
        for pin, rank in zip(group.pins, ORDERS[group.order](group.jobs), strict=True):
            live = self._live[pin.job.name]
            before = live.member
            if before and live.nodes == (pin.rollout, pin.train):
                before.rank = rank
                running.run.resume(before, ends[pin.job.name])
                continue
            member = self._member(pin, live, rank)
            member.done = before.done if before else live.done
            if before:
                live.lost_s += loads.get(pin.job.name, 0.0)
                self._abort(live, before, ends[pin.job.name], now)
            live.member, live.nodes = member, (pin.rollout, pin.train)
            running.run.join(member, loads.get(pin.job.name, 0.0))
        return running

    def _member(self, pin: Pin, live: _Live, rank: int) -> Member:
        job = pin.job
        train = self._mask("train", pin.train)
        rollout = train if job.colocated else self._mask("rollout", pin.rollout)
        return Member(job, rollout, train, rank, live.times)

    def _mask(self, side: str, nodes: Sequence[str]) -> int:
        return sum(1 << self._bits.setdefault(f"{side} {node}", len(self._bits)) for node in nodes)

    def _abort(self, live: _Live, before: Member, ends: float, now: float) -> None:
        """A move throws away the iteration the job is in: it is done again, with other draws."""
        live.moves += 1
        live.lost_s += now - before.finished if before.phase != LOADING else 0.0
        live.phases.forget(before.done)
        if before.phase in (ROLLOUT, TRAIN) and ends < math.inf:
            need = before.needs[before.phase]
            self.ledger.busy_s[need == before.needs[TRAIN]] -= (ends - now) * need.bit_count()

    def _collect(self, run: GroupRun) -> None:
        self.ledger.busy_s[0] += run.busy_s[ROLLOUT]
        self.ledger.busy_s[1] += run.busy_s[TRAIN]

    def _schedule(self, running: _Running) -> None:
        heapq.heappush(self._events, (running.run.next_end(), next(self._serial), running))

    def _book(self, now: float) -> None:
        if now > self._since and self._running:
            groups = [running.group for running in self._running.values()]
            nodes = sum(len(g.rollout_nodes) for g in groups), sum(len(g.train_nodes) for g in groups)
            usd = sum(group.usd_per_hour(self.cluster) for group in groups)
            self.ledger.hold(self._since, now, nodes, usd)
            self.spans.append(Span(now - self._since, self._steps, usd))
        self._since = now
