"""The agent of a host of a run, as long as its jobs run."""

from __future__ import annotations

import sys

import msgspec

from verl_mux.launcher.cluster.reach import python_of, words
from verl_mux.launcher.cluster.to_agent import AgentSpec
from verl_mux.launcher.processes.marked_process import MarkedProcess
from verl_mux.launcher.run_file import RunFile, agent_folder, reached


class AgentProcess(MarkedProcess):
    """This machine's end of it. The agent writes who held which memory there to `events` in its folder, by way of a file system
    that the hosts share, as they do for checkpoints."""

    def __init__(self, host: str, run: RunFile, coordinator: str) -> None:
        spec, directory = reached(run)[host], run.directory / agent_folder(host)
        keys = run.keys_folder()
        to_it = AgentSpec(
            command=words(host, spec, [python_of(spec), "-m", "verl_mux.launcher.cluster.host_agent"]),
            coordinator=coordinator,
            folder=str(directory / "events"),
            keys=str(keys) if keys else None,
        )
        command = [sys.executable, "-m", "verl_mux.launcher.cluster.to_agent", msgspec.json.encode(to_it).decode()]
        super().__init__(f"agent of {host}", directory, "agent.log", command, {})
