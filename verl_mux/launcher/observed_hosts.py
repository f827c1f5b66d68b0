"""Where jobs ran, as the agents of the hosts saw it: by who held device memory there, not by what the jobs say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from verl_mux.coordinator.bus.messages import SIDES
from verl_mux.launcher.run_file import JobSpec, RunFile, agent_folder, agent_hosts
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import Line, read_directory

# Of memory that was held for a node of none of the job's sides.
ELSEWHERE = "elsewhere"


def read(run: RunFile) -> dict[str, dict[str, list[str]]]:
    """By job and side, the hosts on which memory was held for a node of that side, in order of name."""
    folders = [run.directory / agent_folder(host) / "events" for host in agent_hosts(run)]
    return by_side((line for folder in folders for line in read_directory(folder)), run.jobs)


def by_side(lines: Iterable[Line], jobs: Mapping[str, JobSpec]) -> dict[str, dict[str, list[str]]]:
    """As `read`, of these events."""
    found: dict[str, dict[str, set[str]]] = {name: {side: set() for side in SIDES} for name in jobs}
    for line in lines:
        job, node, host = (str(line.extra.get(key, "")) for key in ("job", "node", "host"))
        if line.event != events.DEVICE_MEMORY or job not in found or not line.extra.get("bytes"):
            continue
        nodes = jobs[job].nodes
        sides = [side for side in SIDES if isinstance(nodes, dict) and node in nodes[side]]
        for side in sides or [ELSEWHERE]:
            found[job].setdefault(side, set()).add(host)
    return {job: {side: sorted(hosts) for side, hosts in sides.items()} for job, sides in found.items()}
