"""A filler of a run: `verl-mux hold` with the command that the run file names, as long as there are jobs."""

from __future__ import annotations

import sys

from verl_mux.launcher.processes.marked_process import MarkedProcess
from verl_mux.launcher.run_file import FillerSpec, RunFile, fill

# How long a process that has left its exit code has to be gone.
_ENDING_S = 10.0


class FillerProcess(MarkedProcess):
    """Its end is no job's end: the launcher reports one that fails, and the run goes on."""

    def __init__(self, name: str, spec: FillerSpec, run: RunFile, address: str) -> None:
        where = ["--coordinator", address, "--name", name, "--pool", spec.pool, "--nodes", str(spec.nodes)]
        how = ["--grace", str(spec.grace), "--least", str(spec.least)]
        door = [sys.executable, "-m", "verl_mux.launcher.processes.keep_exit_code", str(run.directory / name / "exit_code")]
        command = [*door, "verl_mux", "hold", *where, *how, "--", *fill(spec.command, run, name)]
        super().__init__(name, run.directory / name, "filler.log", command, {**run.environment, **spec.environment})

    def finish(self) -> str | None:
        """Ends it, if it has not ended by itself. Returns in words what went wrong with it."""
        went_wrong = None
        if self.returncode is None and self.exit_code_path.exists():
            self._wait(_ENDING_S)  # its command has ended; a signal now would make it look as if we had ended it
        if self.returncode is None:
            self.stop()
        elif self.returncode != 0:
            went_wrong = f"filler {self.name} {self.how_it_ended()} (log: {self.log_path})"
            self.sweep()
        return went_wrong
