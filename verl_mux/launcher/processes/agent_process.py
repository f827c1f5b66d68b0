"""The agent of a host of a run, as long as its jobs run: this machine's end of it. Started by `verl-mux run`."""

from __future__ import annotations

import sys

import msgspec

from verl_mux.coordinator.bus.curve_keys import AGENT
from verl_mux.launcher.host_parts import OnHosts, part_on
from verl_mux.launcher.processes.marked_process import MarkedProcess
from verl_mux.launcher.run_file import RunFile, agent_folder, reached


class AgentProcess(MarkedProcess):
    """The agent logs which process held which memory to `events` in its folder, on a file system that the hosts share, as they
    do for checkpoints."""

    def __init__(self, host: str, run: RunFile, coordinator: str) -> None:
        directory, keys = run.directory / agent_folder(host), run.keys_folder()
        spec = OnHosts(
            parts=[part_on(host, reached(run)[host])], folder=str(directory), towards=run.towards, role=AGENT, again=True,
            keys=str(keys) if keys else None,
        )  # fmt: skip
        agent = ["verl_mux", "agent", "--coordinator", coordinator, "--log-dir", str(directory / "events")]
        command = [sys.executable, "-m", "verl_mux.launcher.on_hosts", msgspec.json.encode(spec).decode(), *agent]
        super().__init__(f"agent of {host}", directory, "agent.log", command, {})
