"""The processes of one bench: trainer ranks and workers on their hosts, and one sync among them at a time.

Runs in the bench's or a test's process; starts participant.py for each end.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from bench.sync.links import Bed
from bench.sync.participant import digest_of, entries_of
from verl_mux.errors import Failure
from verl_mux.sync.connection import new_key
from verl_mux.sync.ends import EndPart, Meeting, Sender, link_between, two_stage
from verl_mux.sync.receiving import Role
from verl_mux.sync.sending import Target

# Of a pair: over a link that is shaped for the pair more streams gain nothing.
_PIECE_BYTES, _STREAMS = 256 << 10, 2
_SETTINGS = {"piece_bytes": _PIECE_BYTES, "streams": _STREAMS, "timeout_s": 300.0}
METHODS = ("two_stage", "pull")


def parts(method: str, trainers: Sequence[Meeting], workers: Sequence[Meeting]) -> tuple[list[EndPart], list[EndPart]]:
    """The product's plan, or `pull`, its yardstick: each worker takes the whole model from one trainer rank."""
    if method == "two_stage":
        return two_stage(trainers, workers)
    ranks = [f"trainer rank {rank} on {it.name}" for rank, it in enumerate(trainers)]
    labels = [f"rollout worker {number} on {it.name}" for number, it in enumerate(workers)]
    targets: list[list[Target]] = [[] for _ in ranks]
    receiving: list[EndPart] = []
    for number, worker in enumerate(workers):
        rank = number % len(ranks)
        targets[rank].append(Target(worker.address, labels[number], link_between(trainers[rank], worker)))
        receiving.append(Role(labels[number], {ranks[rank]: rank}))
    return [Sender(*it) for it in zip(ranks, targets, strict=True)], receiving


class _Process:
    def __init__(self, words: Sequence[str], host: str, address: str, cluster: str, model_bytes: int, settings: dict) -> None:
        command = [*words, sys.executable, "-m", "bench.sync.participant"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self.name = f"{cluster} process on {host}"
        self.order("make", host=host, address=address, cluster=cluster, model_bytes=model_bytes, settings=settings)

    def order(self, what: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Raises Failure."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        reply = json.loads(line) if line else {"error": "it ended"}
        if "error" in reply:
            raise Failure(f"{self.name}: {reply['error']}")
        return reply["ok"]


class Group:
    """`processes`, `meetings`: of the trainer ranks, then of the workers; `shares`: of the model, that each rank sends."""

    def __init__(self, processes: list[_Process], model_bytes: int, shares: Sequence[float]) -> None:
        self.processes, self._shares = processes, shares
        self._entries, self._model_bytes = entries_of(model_bytes), model_bytes
        self.answers()
        for process in processes:
            process.order("meet")
        self.meetings = [msgspec.convert(met, Meeting) for met in self.answers()]

    @classmethod
    @contextlib.contextmanager
    def on(cls, bed: Bed, workers_per_host: int, model_bytes: int, shares: Sequence[float]) -> Iterator[Group]:
        trainers = [(bed.inside(name), name, address) for name, address in bed.trainers.items()]
        hosts = [(bed.inside(name), name, address) for name, address in bed.hosts.items() for _ in range(workers_per_host)]
        with cls.of(trainers, hosts, model_bytes, shares, _SETTINGS) as group:
            yield group

    @classmethod
    @contextlib.contextmanager
    def of(
        cls, trainers: Sequence[tuple], workers: Sequence[tuple], model_bytes: int, shares: Sequence[float], settings: dict,
    ) -> Iterator[Group]:  # fmt: skip
        """`trainers`, `workers`: of each the words that lead to its host, the host's name and address."""
        processes: list[_Process] = []
        try:
            for cluster, places in (("train", trainers), ("rollout", workers)):
                for words, host, address in places:
                    processes.append(_Process(words, host, address, cluster, model_bytes, settings))
            yield cls(processes, model_bytes, shares)
        finally:
            for it in processes:
                it.process.kill()
                it.process.communicate()

    def sync(self, method: str, version: int) -> dict[str, Any]:
        """One, by this method; seconds from the first order until the last worker has everything."""
        results, seconds = self.raw_sync(method, version)
        slow = round(sum(it.get("slow_bytes", 0.0) for it in results))
        wanted = digest_of(self._entries, version)
        same = all(it["digest"] == wanted for it in results[len(self._shares) :])
        return {
            "seconds": seconds,
            "slow_bytes": slow,
            "slow_bytes_over_model": slow / self._model_bytes,
            "bit_equal": same,
        }

    def raw_sync(self, method: str, version: int) -> tuple[list[dict[str, Any]], float]:
        """What trainers, then workers say of it, and the seconds."""
        began = self.begin(method, version)
        results = self.answers()
        return results, max(it["ended"] for it in results[len(self._shares) :]) - began

    def begin(self, method: str, version: int) -> float:
        """Order all processes to take part. Returns when."""
        split = len(self._shares)
        trainers, workers = self.processes[:split], self.processes[split:]
        senders, receivers = parts(method, self.meetings[:split], self.meetings[split:])
        key = new_key().hex()
        for process, part in zip(self.processes, [*senders, *receivers], strict=True):
            process.order("join", part=msgspec.to_builtins(part), key=key)
        at = 0.0
        for rank, (process, share) in enumerate(zip(trainers, self._shares, strict=True)):
            whole = method == "pull"
            process.order("hold", version=version, rank=rank, start=0.0 if whole else at, end=1.0 if whole else at + share)
            at += share
        for process in (*self.processes, *trainers):
            process.answer()
        began = time.time()
        for process in workers:
            process.order("take", version=version)
        for process in trainers:
            process.order("send", version=version)
        return began

    def answers(self, without: Sequence[int] = ()) -> list[Any]:
        """Of all processes but these. Raises Failure, with what each says."""
        answers, errors = [], []
        for number, process in enumerate(self.processes):
            if number in without:
                continue
            try:
                answers.append(process.answer())
            except Failure as error:
                errors.append(str(error))
        if errors:
            raise Failure("; ".join(errors))
        return answers
