"""A filler with a real process: what is said of its end."""

import os
import sys
from pathlib import Path

from verl_mux.launcher.processes.filler_process import FillerProcess
from verl_mux.launcher.run_file import FillerSpec, RunFile

# Leaves its exit code, as `keep_exit_code` does, and is gone only when the pipe is written to.
ENDING = """
import pathlib, sys
half = pathlib.Path("half")
half.write_text("5\\n")
half.rename("exit_code")
open(sys.argv[1]).read()
raise SystemExit(5)
"""


class Ending(FillerProcess):
    """Is gone as soon as somebody waits for it."""

    pipe: Path

    def _wait(self, seconds: float) -> None:
        if self.pipe.exists():
            self.pipe.write_text("")
            self.pipe.unlink()
        super()._wait(seconds)


def test_one_that_has_just_failed_is_told_of_although_its_process_is_not_gone_yet(tmp_path):
    spec = FillerSpec(pool="rollout", command=["true"])
    filler = Ending(
        "sums", spec, RunFile(dir=str(tmp_path), coordinator={}, jobs={}, fillers={"sums": spec}), "tcp://127.0.0.1:1"
    )
    filler.pipe = tmp_path / "pipe"
    os.mkfifo(filler.pipe)
    filler._command = [sys.executable, "-c", ENDING, str(filler.pipe)]
    filler.start()
    while not filler.exit_code_path.exists():
        assert filler.returncode is None
    assert (filler.finish() or "").startswith("filler sums ended with exit code 5")
