"""What becomes of the records when hosts are seen, lost, and found empty again. Pure; the machine then fences anew."""

from __future__ import annotations

from verl_mux.coordinator.bus.messages import HostName
from verl_mux.coordinator.core.inputs_and_instructions import (
    HostGone,
    HostReleased,
    HostSeen,
    Instruction,
    Log,
    NodeReleased,
    NodesOwed,
    OwedPaid,
)
from verl_mux.coordinator.core.records import Host, Owed, State
from verl_mux.profiling.eventlog import events

Change = HostSeen | HostGone | OwedPaid | HostReleased | NodeReleased


def change(state: State, what: Change, now: float) -> list[Instruction]:
    """What concerns no lease. An input about what is not on record, come late, changes nothing."""
    if isinstance(what, HostSeen):
        return _seen(state, what.host, now)
    if isinstance(what, NodeReleased):
        return _node_released(state, what.node)
    host = state.hosts.get(what.host)
    if host is None:
        return []
    if isinstance(what, OwedPaid):
        host.owed = [owed for owed in host.owed if owed.uid != what.uid]
    elif isinstance(what, HostReleased):
        host.owed, host.excused = [], []
        host.agent = host.gone = False  # as if none had ever spoken from there
    else:
        host.gone, host.since = True, now
        return [Log(events.HOST_GONE, {"host": host.name})]
    _forget_if_nothing_is_known(state, what.host)
    return []


def owe(state: State, what: NodesOwed, now: float) -> None:
    host = state.hosts.setdefault(what.host, Host(names=[what.host.rstrip("/")], since=now))
    before = [owed for owed in host.owed if owed.uid == what.uid]
    nodes = list(dict.fromkeys([*(node for owed in before for node in owed.nodes), *what.nodes]))
    owed = Owed(job=what.job, uid=what.uid or "", since=before[0].since if before else now, nodes=nodes)
    host.owed = [other for other in host.owed if other.uid != what.uid] + [owed]


def _seen(state: State, name: HostName, now: float) -> list[Instruction]:
    host = state.hosts.setdefault(name.key, Host(names=name.names, since=now))
    if host.boot != name.boot:
        host.owed = []  # what ran before the boot runs no more
    for key, other in list(state.hosts.items()):
        if other is host:
            continue
        if not other.agent and set(other.names) <= set(name.names):  # where nobody could look, somebody can now
            host.owed += other.owed
            del state.hosts[key]
        elif other.name == name.name and other.agent and other.boot != name.boot:
            del state.hosts[key]
    host.names, host.boot, host.space = name.names, name.boot, name.space
    host.agent, host.gone, host.excused, host.since = True, False, [], now
    return [Log(events.HOST_SEEN, {"host": host.name, "addresses": name.addresses, "boot": name.boot})]


def _node_released(state: State, node: str) -> list[Instruction]:
    for key, host in list(state.hosts.items()):
        host.owed = [_without(owed, node) for owed in host.owed]
        if not host.agent:
            host.owed = [owed for owed in host.owed if owed.nodes]
        if host.gone and node not in host.excused:
            host.excused.append(node)
        _forget_if_nothing_is_known(state, key)
    return []


def _without(owed: Owed, node: str) -> Owed:
    return Owed(job=owed.job, uid=owed.uid, since=owed.since, nodes=[other for other in owed.nodes if other != node])


def _forget_if_nothing_is_known(state: State, key: str) -> None:
    host = state.hosts[key]
    if not host.agent and not host.owed:
        del state.hosts[key]
