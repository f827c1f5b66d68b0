"""Fixtures of more than one area. Real files, sockets and process groups; nothing here starts Ray or an engine."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import order
from tests.exploring import UNTIL, register_profiles
from tests.warm import waiting
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.platform.choose import accelerator_present
from verl_mux.warm import fork_client, fork_server

ROOT = Path(__file__).parents[1]

# Two cores are shared by everything that runs here, and the tests' tensors are small.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# Where the tests run in the background of a shell, SIGINT is ignored, here and in every process that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
register_profiles()

# What the product keeps for its user from one start to the next, keys say, the tests keep apart.
_STATE = tempfile.TemporaryDirectory(prefix="verl_mux_tests_")
os.environ["XDG_STATE_HOME"] = _STATE.name

# An environment has one engine, and may lack Megatron. Folders and files of tests that need one bear its name.
collect_ignore_glob = [f"*{name}*" for name in ("sglang", "vllm", "megatron") if find_spec(name) is None]
# verl finds vLLM's build for the CPU on that platform alone, which is chosen when verl is imported first.
if find_spec("vllm") is not None and not accelerator_present():
    os.environ.setdefault("VERL_PLATFORM", "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: order.place(item.path))


@pytest.hookimpl(optionalhook=True)  # vLLM's environment has no workers to give tests to
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return order.group(ROOT / nodeid.partition("::")[0])

    return Groups(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list) -> None:
    from tests.warm import workers

    server = workers.start(specs)
    config.add_cleanup(server.stdin.close)


def pytest_runtest_setup() -> None:
    """What a test draws at random depends on no test before it."""
    if time.time() > float(os.environ.get(UNTIL, "inf")):
        pytest.skip("the time to explore is over")
    random.seed(0)
    os.environ.pop(UID_VARIABLE, None)  # the mark of a job that a test before it was
    if not accelerator_present():
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # of a rollout worker that a test before it was
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run that skipped a test is no passing run where VERL_MUX_NO_SKIPS is set, as in CI."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if skipped and os.environ.get("VERL_MUX_NO_SKIPS") and session.exitstatus == 0:
        reporter.write_line(f"{len(skipped)} tests were skipped, and VERL_MUX_NO_SKIPS allows none", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """The command that finds the same failures again, of tests that looked for new examples."""
    profile, seed = config.getoption("--hypothesis-profile"), config.getoption("--hypothesis-seed")
    for report in terminalreporter.stats.get("failed", ()) if profile and seed else ():
        command = f"{sys.executable} -m pytest --hypothesis-profile={profile} --hypothesis-seed={seed} '{report.nodeid}'"
        terminalreporter.write_line(f"again: {command}")


@pytest.fixture
def one_rank_mesh(tmp_path) -> Iterator:
    """A device mesh over a gloo world of this process alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def run_main(monkeypatch, capsys):
    """`verl-mux ARGUMENTS...` in this process: (exit code, stdout, stderr)."""

    from verl_mux import cli

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["verl-mux", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture(scope="session")
def python() -> Callable[..., subprocess.CompletedProcess]:
    """Run `python ARGUMENTS...` in a process of its own, with these variables set; None takes one away."""
    return partial(_run, [sys.executable])


@pytest.fixture(scope="session")
def forking() -> Iterator[list[str]]:
    """The words that start Python as a fork of a process that has imported torch and the engine, for programs of the CPU that
    would take ten seconds for it, and so would each process of their engines."""
    command = [sys.executable, "-m", fork_server.__name__, "tests.warm.waiting"]
    environment = {**os.environ, "VERL_PLATFORM": "cpu"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, cwd=ROOT, **pipes) as server:
        name = next(line.partition(waiting.MARK)[2].strip() for line in server.stdout if waiting.MARK in line)
        yield [sys.executable, "-I", "-S", fork_client.__file__, name]
        server.stdin.close()


@pytest.fixture(scope="session")
def forked(forking) -> Callable[..., subprocess.CompletedProcess]:
    """As `python`, with such forks."""
    return partial(_run, forking)


def _run(
    interpreter: list[str], *arguments: str, timeout: float = 120.0, cwd: Path | None = None, **environment: str | None
) -> subprocess.CompletedProcess:
    merged = {k: v for k, v in {**os.environ, **environment}.items() if v is not None}
    command = [*interpreter, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=merged, cwd=cwd, timeout=timeout, check=False)
