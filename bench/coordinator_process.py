"""A coordinator as users start it, in a process of its own.

Runs in a bench or a test; called by those that load a coordinator and do it harm. Touches a temporary folder and the process.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from verl_mux.errors import Failure


class CoordinatorProcess:
    """`start` -> `stop` -> `start`, at the same address with the same journal. Also a context manager. folder: with the journal;
    a new one in `directory`."""

    def __init__(self, config: dict[str, Any], log_directory: Path | None = None, directory: Path | None = None) -> None:
        self._directory = tempfile.TemporaryDirectory(dir=directory)
        self.folder = Path(self._directory.name)
        (self.folder / "coordinator.yaml").write_text(json.dumps(config))  # which is YAML
        self._logging = [] if log_directory is None else ["--log-dir", str(log_directory)]
        self.address = "tcp://127.0.0.1:0"
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "verl_mux", "coordinator", "--config", str(self.folder / "coordinator.yaml")]
        command += ["--journal", str(self.folder / "journal"), *self._logging, "--bind", self.address]
        output = self.folder / "stderr"
        with output.open("w") as file:
            self._process = subprocess.Popen(command, stderr=file, stdout=file)
        while (found := re.search(r"coordinator at (\S+)", output.read_text())) is None:
            if not self.alive:
                raise Failure(f"the coordinator did not start: {output.read_text()}")
        self.address = found[1]

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def cpu_s(self) -> float:
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system

    @property
    def rss_mib(self) -> float:
        return psutil.Process(self.pid).memory_info().rss / 2**20

    def __enter__(self) -> CoordinatorProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._directory.cleanup()
