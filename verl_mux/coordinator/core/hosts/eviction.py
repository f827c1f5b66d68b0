"""Jobs that wait for host memory, and jobs that leave it for the disk so that others come to theirs. Pure.

With `evict_to_disk_after` a job whose states do not fit beside those that are there is not refused:

    waits, in order of arrival -> some are asked to leave -> each saves at the end of its step and leaves -> the first that waits
    comes in -> who left is started again by whoever started it, and waits in its turn

Asked are, of the jobs that have been there for that long and would be started again: those that do not run before those that
do, then those whose next turn is farthest, then the largest; no more than are needed, and nobody where all of them would not be
enough. Who is asked makes at least one step first, so that nothing goes back and forth without coming on. They are asked, and
leave, as for a move (see trainer/leaving.py); nothing is kept for them meanwhile. A job that finds room by itself while it waits
has nobody leave for it any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.hosts import memory
from verl_mux.coordinator.core.inputs_and_instructions import Instruction, Log
from verl_mux.coordinator.core.records import Eviction, HostMemory, Job, JobState, Room, State
from verl_mux.coordinator.core.settings import Config
from verl_mux.profiling.eventlog import events


class Resident(NamedTuple):
    """A job that may be asked. held: bytes by node. turn: requests before its own in its queue; None: it has not asked."""

    name: str
    held: Mapping[str, int]
    runs: bool
    turn: int | None


def choose(lack: Mapping[str, int], residents: Iterable[Resident]) -> list[str] | None:
    """Who is to leave so that on each node at least the bytes that it lacks come free; None: they are not enough."""

    def order(it: Resident) -> tuple[bool, bool, int, int]:
        return it.runs, it.turn is not None, -(it.turn or 0), -sum(it.held.get(node, 0) for node in lack)

    left, chosen = dict(lack), list[Resident]()
    for resident in sorted(residents, key=order):
        if all(num_bytes <= 0 for num_bytes in left.values()):
            break
        if any(num_bytes > 0 and resident.held.get(node, 0) for node, num_bytes in left.items()):
            chosen.append(resident)
            left = {node: num_bytes - resident.held.get(node, 0) for node, num_bytes in left.items()}
    if any(num_bytes > 0 for num_bytes in left.values()):
        return None
    for resident in reversed(list(chosen)):  # a later one may have freed alone what an earlier one freed in part
        if all(resident.held.get(node, 0) + num_bytes <= 0 for node, num_bytes in left.items()):
            chosen.remove(resident)
            left = {node: num_bytes + resident.held.get(node, 0) for node, num_bytes in left.items()}
    return [resident.name for resident in chosen]


# --- who waits --------------------------------------------------------------------------------------------------------


def may_wait(asked: m.Register, nodes: Mapping[str, list[str]], config: Config) -> bool:
    """Whether a job that names its nodes and does not fit now is let in to wait; one that can never fit is not."""
    if config.evict_to_disk_after is None or asked.filler:
        return False
    needs = memory.told(asked, nodes, config)
    sizes = [(config.nodes[node].host_bytes, sum(need.told.values())) for node, need in needs.items()]
    return all(capacity is None or num_bytes <= capacity for capacity, num_bytes in sizes)


def has_to_wait(asked: m.Register, nodes: Mapping[str, list[str]], state: State, config: Config) -> bool:
    """For its own room, behind others that wait for theirs on one of its nodes, or until it is known who is there."""
    if not may_wait(asked, nodes, config):
        return False
    names = {node for side in nodes.values() for node in side}
    behind = any(not names.isdisjoint(room.all_nodes) for _, room in _waiting(state))
    return behind or state.settle_until is not None or memory.refusal(asked, nodes, state, config) is not None


def waits(state: State, config: Config, asked: m.Register, nodes: dict[str, list[str]], now: float) -> None:
    """`nodes`: pools spelt out."""
    needs = memory.told(asked, nodes, config)
    state.rooms[asked.job] = Room(nodes=nodes, needs=needs, since=now, only_looks=asked.only_looks)


def gone(state: State, name: str) -> None:
    """The job is over, or dying: it waits for nothing, and nobody asks it for anything."""
    state.rooms.pop(name, None)
    state.evictions.pop(name, None)


def settle(state: State, config: Config, now: float) -> tuple[list[Job], list[Instruction]]:
    """Lets in who has room by now, and asks others to leave for who has not. Returns the jobs that are to be told so."""
    if not (state.rooms or state.evictions) or state.settle_until is not None:
        return [], []
    ledger = _Ledger(state, config)
    admitted: list[Job] = []
    out: list[Instruction] = []
    for name, room in _admissible(state, ledger):
        job = state.jobs[name]
        job.nodes, job.host_memory, job.resident_since = room.nodes, room.needs, now
        del state.rooms[name]
        ledger.add(job)
        admitted.append(job)
        out.append(Log(events.ROOM_FOUND, {"job": name, "nodes": room.nodes}, duration=now - room.since))
    for name in [name for name, it in state.evictions.items() if it.room_for not in state.rooms]:
        del state.evictions[name]
    return admitted, [*out, *_make_room(state, config, ledger, now)]


def _waiting(state: State) -> list[tuple[str, Room]]:
    """In order of arrival. Who is not heard from stands in nobody's way."""
    return [(name, room) for name, room in state.rooms.items() if not room.only_looks and state.jobs[name].state is JobState.LIVE]


def _admissible(state: State, ledger: _Ledger) -> Iterator[tuple[str, Room]]:
    """Those that have room now, one after the other as each is let in, and before whom nobody waits for one of their nodes."""
    before: set[str] = set()
    for name, room in _waiting(state):
        if before.isdisjoint(room.all_nodes) and not ledger.lack(room):
            yield name, room
        else:
            before.update(room.all_nodes)


def _heads(state: State) -> Iterator[tuple[str, Room]]:
    """Those before whom nobody waits for one of their nodes."""
    before: set[str] = set()
    for name, room in _waiting(state):
        if before.isdisjoint(room.all_nodes):
            yield name, room
        before.update(room.all_nodes)


class _Ledger:
    """What jobs hold of the host memory of each node."""

    def __init__(self, state: State, config: Config) -> None:
        self._limits = {node: about.host_bytes for node, about in config.nodes.items() if about.host_bytes is not None}
        self._held: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for job in state.jobs.values():
            self.add(job)

    def add(self, job: Job) -> None:
        for node in job.host_memory:
            self._held[node][job.name] = memory.counted(job, node)

    def lack(self, room: Room, but: Collection[str] = ()) -> dict[str, int]:
        """Bytes that it lacks beside those that are there, by node; none where it has room. `but`: jobs that do not count."""
        found: dict[str, int] = {}
        for node in room.all_nodes:
            if (limit := self._limits.get(node)) is not None:
                held = sum(num_bytes for job, num_bytes in self._held[node].items() if job not in but)
                found[node] = held + sum(room.needs.get(node, HostMemory()).told.values()) - limit
        return {node: num_bytes for node, num_bytes in found.items() if num_bytes > 0}


# --- who leaves -------------------------------------------------------------------------------------------------------


def _make_room(state: State, config: Config, ledger: _Ledger, now: float) -> list[Instruction]:
    """For the first that waits for each node. Those behind it are thought of when it is in."""
    out: list[Instruction] = []
    dying = [job.name for job in state.jobs.values() if job.state is JobState.DYING]
    for name, room in _heads(state):
        leaving = [job for job, it in state.evictions.items() if it.room_for == name]
        lack = ledger.lack(room, but=[*leaving, *dying])
        for job in choose(lack, _residents(lack, state, config, now)) or ():
            out.append(_ask(state, job, name, now))
    return out


def _residents(nodes: Collection[str], state: State, config: Config, now: float) -> list[Resident]:
    """Jobs that hold something on these nodes and may be asked, in order of registration."""
    found = [job for job in state.jobs.values() if _may_be_asked(job, nodes, state, config, now)]
    runs = {lease.job for lease in state.leases.values()}
    return [
        Resident(job.name, {node: memory.counted(job, node) for node in nodes}, job.name in runs, _turn(job, state))
        for job in sorted(found, key=lambda job: job.order)
    ]


def _may_be_asked(job: Job, nodes: Collection[str], state: State, config: Config, now: float) -> bool:
    """It runs steps, would be started again, has had its time, and is not about to leave or to end."""
    if not (job.movable and job.state is JobState.LIVE and job.initialised and job.running and job.watched is None):
        return False
    rested = now - job.resident_since >= (config.evict_to_disk_after or 0.0)
    return rested and job.name not in state.evictions and any(memory.counted(job, node) for node in nodes)


def _turn(job: Job, state: State) -> int | None:
    """How many requests stand before its first one in the queues of that one's nodes."""
    mine = next((at for at, request in enumerate(state.requests) if request.job == job.name), None)
    if mine is None:
        return None
    nodes = set(state.requests[mine].nodes)
    return sum(not nodes.isdisjoint(request.nodes) for request in state.requests[:mine] if not request.is_fillers)


def _ask(state: State, name: str, room_for: str, now: float) -> Log:
    job = state.jobs[name]
    state.num_moves += 1
    state.evictions[name] = Eviction(number=state.num_moves, since=now, room_for=room_for)
    frees = {node: memory.counted(job, node) for node in state.rooms[room_for].all_nodes if node in job.host_memory}
    return Log(events.EVICTION_ASKED, {"job": name, "number": state.num_moves, "room_for": room_for, "bytes": frees})


def asked_of(state: State, name: str) -> int:
    """The number under which the job is to leave, as for a move; 0: it is not."""
    it = state.evictions.get(name)
    return it.number if it is not None else 0


def leaves(state: State, job: Job, what: m.Deregister, now: float) -> list[Instruction]:
    """The job says that it leaves because it was asked to, or was until a moment ago."""
    if not what.moving or job.watched is not None:
        return []
    it = state.evictions.get(job.name)
    state.num_evicted += 1
    about = {"job": job.name, "number": what.moving, "done": what.step, "saving_s": what.saving_s}
    return [Log(events.EVICTED_TO_DISK, about, duration=now - it.since if it is not None else None, step=what.step)]


# --- what is shown ----------------------------------------------------------------------------------------------------


def reason(state: State, name: str) -> str:
    """Why the job has no nodes yet, for itself."""
    room, nodes = state.rooms[name], set(state.rooms[name].all_nodes)
    before = [other for other, it in _waiting(state) if it.since < room.since and not nodes.isdisjoint(it.all_nodes)]
    leaving = [job for job, it in state.evictions.items() if it.room_for == name]
    words = f"; {', '.join(leaving)} will leave for it" if leaving else f"; {len(before)} jobs wait before it" if before else ""
    return f"job {name!r} waits for host memory on {', '.join(room.all_nodes)}{words}"


def about(state: State, now: float) -> dict[str, Any]:
    """For `verl-mux status`: who waits, who is to leave, and each of them in a sentence."""
    waiting = {name: now - room.since for name, room in _waiting(state)}
    told = {name: reason(state, name).removeprefix(f"job {name!r} ") for name in waiting}
    for name, it in state.evictions.items():
        told[name] = f"makes room for {it.room_for}: asked {now - it.since:.0f} s ago, it saves and leaves at the end of its step"
    return {"waiting": waiting, "leaving": list(state.evictions), "evicted": state.num_evicted, "told": told}
