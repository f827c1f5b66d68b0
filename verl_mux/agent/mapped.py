"""Who mapped how much memory on which node, as the agent saw it: each change as a line of its log.

That is a record from outside of the jobs: read together, the logs of all agents show whether a node ever had two holders.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_mux.coordinator.bus.messages import AgentAnswer, AgentReport, Holder, NodeHere
from verl_mux.profiling.eventlog import events

_Key = tuple[str, int, str]  # uid, pid, node


class MappedLog:
    """`tell` after each report, with the answer to it or the last one."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._before: dict[_Key, int] = {}
        self._names: dict[str, str] = {}

    def tell(self, report: AgentReport, answer: AgentAnswer | None, seen_at: float) -> None:
        """`seen_at`: epoch seconds of the look. A process whose job the coordinator does not know is told with an empty name."""
        self._names.update(answer.jobs if answer else {})
        nodes = answer.nodes if answer else {}
        now = {key: held for holder in report.holders for key, held in _entries(holder) if held}
        for key in dict.fromkeys([*self._before, *now]):
            before, held = self._before.get(key, 0), now.get(key, 0)
            if before != held:
                self._say(key, before, held, report, nodes, seen_at)
        self._before = now
        told = {uid for uid, _, _ in now}
        self._names = {uid: name for uid, name in self._names.items() if uid in told}

    def _say(self, key: _Key, before: int, held: int, report: AgentReport, nodes: Mapping[str, NodeHere], at: float) -> None:
        uid, pid, node = key
        lease = nodes.get(node)
        about = {"host": report.host.name, "node": node, "job": self._names.get(uid, ""), "pid": pid, "bytes": held}
        leased = {"leased_to": lease.job if lease else "", "token": lease.token if lease else 0}
        self._log.log(events.DEVICE_MEMORY, extra={**about, "before": before, **leased, "source": report.source}, timestamp=at)


def _entries(holder: Holder) -> list[tuple[_Key, int]]:
    return [((holder.uid, holder.member.pid, node), held) for node, held in holder.bytes.items()]
