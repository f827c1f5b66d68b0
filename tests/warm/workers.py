"""The workers of pytest-xdist as forks of one process that has imported what most tests need: an import takes its seconds once a
run, not once a worker.

    pytest -n 4 (start) -- python -m tests.warm.workers serve          imports, and forks
         '-- worker: fork_client.py -- python -m tests.warm.workers work   a fork: what execnet asks for, run here
                '-- rank of a test: start method `forkserver`      a fork of what the worker was at first, without threads
"""

import importlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import execnet

from tests.warm import waiting
from verl_mux.warm import fork_client, fork_server

ROOT = Path(__file__).parents[2]
# None of them imports ray, which reads its settings from the environment when it is imported, or starts a thread.
IMPORTED = ("datasets", "tensordict", "mbridge", "sglang.srt.layers.attention.flashinfer_backend")


def start(specs: list[execnet.XSpec]) -> subprocess.Popen:
    """Have the workers of these specs forked. The process that forks them ends when its standard input is closed."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, "-m", __name__, "serve"], cwd=ROOT, **pipes)
    name = next(line.partition(waiting.MARK)[2].strip() for line in server.stdout if waiting.MARK in line)
    python = shlex.join([sys.executable, "-I", "-S", fork_client.__file__, name, "-m", __name__, "work"])
    specs[:] = [execnet.XSpec(f"popen//python={python}//execmodel=main_thread_only//id={spec.id}") for spec in specs]
    return server


def serve() -> None:
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    for module in IMPORTED:
        importlib.import_module(module)
    assert not fork_server.why_not_fork()
    name = f"verl_mux/{fork_client.space()}/{os.getpid()}/tests"
    environment = {**os.environ, waiting.VARIABLE: name}
    asked = fork_server.Asked(["-m", waiting.__name__], environment, str(ROOT), sorted(os.sched_getaffinity(0)), os.nice(0))
    fork_server.become(fork_server.ForkServer(name).serve(fork_server.Program(asked, [0, 1, 2], driver=True)))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        exec(sys.argv[-1])
