"""Which nodes nobody gets now, because their host cannot be looked at or something of a job may be left there. Pure.

A node that names no host, or one from which no agent ever spoke, is fenced only by what a dying job may have left on it.
"""

from __future__ import annotations

from verl_mux.coordinator.core.records import Host, State
from verl_mux.coordinator.core.settings import Config, Node


def fenced(state: State, config: Config) -> dict[str, str]:
    """By node: why, in words."""
    found = {node.name: _reason(node, state) for node in config.nodes.values()} if state.hosts else {}
    return {node: reason for node, reason in found.items() if reason}


def shut(state: State, config: Config) -> frozenset[str]:
    """Nodes on which no job is to be placed."""
    return config.draining | state.fenced.keys()


def refused(nodes: list[str], state: State, config: Config) -> str | None:
    """Why a request that names these nodes is held back, in one word; None: it is not."""
    if state.fenced and not state.fenced.keys().isdisjoint(nodes):
        return "fenced"
    return "draining" if not config.draining.isdisjoint(nodes) else None


def _reason(node: Node, state: State) -> str:
    reasons = [_of(host, node) for host in state.hosts.values()]
    return "; ".join(reason for reason in reasons if reason)


def _of(host: Host, node: Node) -> str:
    left = [repr(owed.job) for owed in host.owed if node.name in owed.nodes]
    if host.gone and node.host in host.names and node.name not in host.excused:
        may = f", and job {', '.join(left)} may be left there" if left else ""
        return f"the agent of host {host.name} is not heard{may}"
    if left and not host.agent:
        return f"job {', '.join(left)} may be left on host {host.name}, where no agent looks"
    return f"something of job {', '.join(left)} may be left on host {host.name}" if left else ""
