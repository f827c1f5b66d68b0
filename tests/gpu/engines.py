"""Engines in processes of their own, and the beds they run on: CUDA, or a device with a budget."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.gpu import record
from tests.gpu.engine_process import ANSWER, serve
from verl_mux.agent.agent import Nvml
from verl_mux.memory.tags import KV_CACHE, WEIGHTS
from verl_mux.platform.charges import Charges
from verl_mux.rollout.engine import server_directory
from verl_mux.rollout.engine.server_directory import DIRECTORY_VARIABLE
from verl_mux_cpu import device_ledger

ROOT = Path(__file__).parents[2]
BUDGET = 24 * 10**9


class EngineEnded(RuntimeError):
    """Its process is gone."""


class Started:
    """A process of its own, over lines. `interpreter`: the words that start Python."""

    def __init__(self, options: dict[str, Any], environment: dict[str, str], log: Path, interpreter: Sequence[str]) -> None:
        command = [*interpreter, "-m", "tests.gpu.engine_process", json.dumps(options)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        around = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
        self._process: Any = subprocess.Popen(command, stderr=log.open("w"), cwd=ROOT, env=around, **pipes)
        self.pid, self.wait = self.recv()["pid"], self._process.wait

    def send(self, words: dict[str, Any]) -> None:
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def recv(self) -> dict[str, Any]:
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise EOFError


class Forked:
    """A process forked from one that has imported torch, SGLang and our hooks, which takes seconds."""

    def __init__(self, options: dict[str, Any], environment: dict[str, str], _log: Path, _interpreter: Sequence[str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.gpu.preloaded"])
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(options, environment, theirs), daemon=True)
        process.start()
        theirs.close()
        assert process.pid is not None
        self.pid, self.wait, self.send, self.recv = process.pid, process.join, ours.send, ours.recv


class Engine:
    """One engine. `tags`: bytes of each as it started; with `gate` it waits there, and they are known after `open`."""

    def __init__(self, bed: Bed, name: str, share: float, ranks: int = 1, gate: bool = False, fault: str = "") -> None:
        self.ranks, self.before, self.is_on_the_ledger = ranks, bed.used(), bool(bed.environment)
        self.name, self._reports = name, bed.folder / f"reports-{len(bed.started)}-{name}"
        self._reports.mkdir()
        options = {"kind": bed.kind, "folder": str(bed.folder), "share": share, "ranks": ranks, "gate": gate, "fault": fault}
        environment = {**bed.environment, DIRECTORY_VARIABLE: str(self._reports), device_ledger.JOB_VARIABLE: name}
        self._log = bed.folder / f"{name}.log"
        self._line = (Forked if bed.kind == "bed" else Started)(options, environment, self._log, bed.interpreter)
        self.tags: dict[str, int] = {} if gate else self._started()

    def wait_at_gate(self) -> None:
        server_directory.wait_until_engine_is_at_gate(self._reports)

    def open(self) -> None:
        server_directory.open_gate(self._reports)
        self.tags = self._started()

    def _started(self) -> dict[str, int]:
        with record.timed("start"):
            tags = self.answer()
        record.note(**{f"{tag}_bytes": size for tag, size in tags.items()})
        return tags

    def ask(self, do: str, **words: Any) -> Any:
        """Raises RuntimeError with its words, and EngineEnded."""
        with record.timed("_".join([words.get("verb", do), *words.get("tags", ())])):
            self.say(do, **words)
            return self.answer()

    def say(self, do: str, **words: Any) -> None:
        try:
            self._line.send({"do": do, **words})
        except OSError:
            raise EngineEnded(self._last_words()) from None

    def answer(self) -> Any:
        try:
            told = self._line.recv()
        except (EOFError, OSError):
            raise EngineEnded(self._last_words()) from None
        if told["error"] is not None:
            raise RuntimeError(told["error"])
        return told["value"]

    def _last_words(self) -> str:
        word = server_directory.word_left(self._reports)
        return f"{self.name} ended: {word or (self._log.read_text()[-2000:] if self._log.exists() else '')}"

    def tokens(self, count: int = 8) -> list[int]:
        return self.ask("tokens", count=count)

    def sleep(self, level: int = 2, tags: tuple[str, ...] = (KV_CACHE, WEIGHTS)) -> None:
        self.ask("move", verb="sleep", tags=list(tags), level=level)

    def wake(self, *tags: str, level: int = 2) -> None:
        self.ask("move", verb="wake", tags=list(tags), level=level)

    def back(self) -> None:
        """After a sleep at level 2: mapped, filled by a sync, and its cache there."""
        self.wake(WEIGHTS)
        self.ask("sync")
        self.wake(KV_CACHE)

    def pids(self) -> set[int]:
        try:
            return {self._line.pid, *(child.pid for child in psutil.Process(self._line.pid).children(recursive=True))}
        except psutil.NoSuchProcess:
            return set()

    @property
    def pid(self) -> int:
        return self._line.pid

    def end(self) -> None:
        for pid in sorted(self.pids()):
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        self._line.wait()


class Bed:
    """`kind`: of its engines. `budget`: bytes of the device, if it is not CUDA. `limit`: bytes that a process of a sleeping
    engine may keep (`mux.device.charges`). `interpreter`: the words that start Python for an engine."""

    def __init__(self, kind: str, folder: Path, budget: int = BUDGET, interpreter: Sequence[str] = (sys.executable,)) -> None:
        self.kind, self.folder, self.interpreter = kind, folder, interpreter
        own = {device_ledger.DIRECTORY_VARIABLE: str(folder / "devices"), device_ledger.BUDGET_VARIABLE: str(budget)}
        own |= {device_ledger.NODE_VARIABLE: "r0"}
        self.environment = own if kind in ("bed", "cpu") else {}
        self._driver = None if self.environment else Nvml()
        self.started: list[Engine] = []

    def engine(self, name: str, share: float = 0.5, **keys: Any) -> Engine:
        self.started.append(Engine(self, name, share, **keys))
        return self.started[-1]

    def limit(self, ranks: int = 1) -> int:
        return sum(Charges().engine(ranks, True).values())

    def by_pid(self) -> dict[int, int]:
        """Bytes on all devices, as who looks from outside sees them."""
        if self._driver is not None:
            return {pid: sum(by_node.values()) for pid, by_node in self._driver.held({}).by_pid.items()}
        known = [account for _, account in device_ledger.accounts()]
        return {account.pid: account.total for account in known if account.lives}

    def held(self, engine: Engine) -> dict[int | str, int]:
        """Of each process of this engine; those that hold nothing are left out. Where the driver shows none of them, as in most
        containers, each rank has its part of what all devices hold more than before the engine."""
        seen, mine = self.by_pid(), engine.pids()
        found: dict[int | str, int] = {pid: num_bytes for pid, num_bytes in seen.items() if pid in mine and num_bytes}
        if not found and mine and (more := self.used() - engine.before) > 0:
            found = {f"of rank {rank}": more // engine.ranks for rank in range(engine.ranks)}
        record.note(held_bytes=list(found.values()))
        return found

    def used(self) -> int:
        """Bytes on all devices, of all processes."""
        if self._driver is not None:
            held = self._driver.held({})
            return sum(sum(by_node.values()) for by_node in held.by_pid.values()) + sum(held.others.values())
        return sum(self.by_pid().values())

    def close(self) -> None:
        for engine in self.started:
            engine.end()


def opened(kind: str, folder: Path, *given: Any) -> Iterator[Bed]:
    """For fixtures. Where there is a budget this process looks at the same accounts as its engines keep."""
    bed = Bed(kind, folder, *given)
    name = device_ledger.DIRECTORY_VARIABLE
    before = os.environ.get(name)
    try:
        if name in bed.environment:
            os.environ[name] = bed.environment[name]
        yield bed
    finally:
        bed.close()
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
