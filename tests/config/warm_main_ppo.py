"""`python -m verl.trainer.main_ppo ...` many times for one import of verl, which takes ten seconds of a core.

As a program: imports it, then runs it in a fork for each line of stdin, a JSON object: `arguments`, `cwd`, `environment`, and the
files `stdout` and `stderr`. Answers each with the exit code on a line.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

COMMAND = "verl.trainer.main_ppo"
ROOT = Path(__file__).parents[2]


class MainPpo:
    """Call it with the words after `python -m verl.trainer.main_ppo`; a context manager."""

    def __init__(self, folder: Path, *words: str) -> None:
        """`words`: what all command lines have in common, since some of it is read when verl is imported."""
        self._out, self._err = folder / "stdout", folder / "stderr"
        command = [sys.executable, "-m", __name__, *words]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    def __call__(self, *arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
        asked = {"arguments": arguments, "cwd": str(cwd), "environment": environment}
        self._process.stdin.write(json.dumps({**asked, "stdout": str(self._out), "stderr": str(self._err)}) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, self._out.read_text(), self._err.read_text())

    def __enter__(self) -> MainPpo:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def _run(asked: dict) -> None:
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(asked[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(asked["cwd"])
    os.environ.update(asked["environment"])
    sys.argv = [COMMAND, *asked["arguments"]]
    runpy.run_module(COMMAND, run_name="__main__", alter_sys=True)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed while verl is imported is no answer
    importlib.import_module(COMMAND)
    sys.stdout.flush()
    del sys.modules[COMMAND]
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(json.loads(line))
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


if __name__ == "__main__":
    main()
