"""A job of a schedule, in a process of its own: takes its leases, uses its devices, says what jobs say, and trains nothing.

python -m bench.chaos.driver FOLDER JOB ADDRESS SEED PLANTED: until FOLDER/enough or FOLDER/JOB.enough is there. It goes
on from the step that it finished last. Exit code 3: its lease was lost. Started by schedule.py; touches files of the folder
alone.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from bench.chaos.ledger import Ledger
from verl_mux.coordinator.bus.client import Lease, LeaseLost, LocalMux, Mux, connect
from verl_mux.coordinator.bus.members import this_process

NODES = {"rollout": ["r0", "r1"], "train": ["t0"]}
_LATE_S = 0.1


class Device:
    """A node's device, as far as double use can be noticed on it: a file that one process at a time can lock, and the last token.

    `map` -> `unmap`. While it is mapped the file is locked, until the process ends or `unmap`; a stopped process keeps it.
    `checks` False: it takes any token, which is a fault to be noticed."""

    def __init__(self, path: Path, checks: bool) -> None:
        self._path, self._checks = path, checks
        self._file: int | None = None

    def map(self, token: int) -> str | None:
        """Once is enough. Gives what is wrong, if anything: `double use`, or `old token`."""
        if self._file is not None:
            return None
        file = os.open(self._path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            return "double use"
        old = int(os.pread(file, 64, 0) or 0) > token
        os.pwrite(file, b"%-40d" % token, 0)
        self._file = file
        return "old token" if old else None

    def unmap(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def takes_stale(self, token: int) -> bool:
        """For a call that was held up on its way and comes when its lease is over: whether it was let through although another
        lease has used the device since."""
        stale = int(self._path.read_bytes() or 0) != token
        return stale and not self._checks


class _Impatient(Exception):
    pass


def main() -> None:
    folder, job, address, seed, planted = Path(sys.argv[1]), *sys.argv[2:]
    signal.signal(signal.SIGALRM, _be_impatient)
    driver = _Driver(folder, job, random.Random(f"{seed} {job} {os.getpid()}"), checks=planted != "token unchecked")
    try:
        driver.run(address)
    except LeaseLost as error:
        driver.ledger.write("lease lost", text=str(error))
        os._exit(3)  # without a goodbye, as a job that crashes


def _be_impatient(_number: int, frame: FrameType | None) -> None:
    """Anywhere in the client's call, but not in the driver's own lines: the line that disarms the timer does not expect it."""
    while frame is not None:
        if frame.f_code is Mux.acquire.__code__:
            raise _Impatient
        frame = frame.f_back


class _Driver:
    def __init__(self, folder: Path, job: str, rng: random.Random, checks: bool) -> None:
        self._folder, self._job, self._rng = folder, job, rng
        self.ledger = Ledger(folder / "ledger" / f"{job}.{os.getpid()}.jsonl", job)
        self._checks = checks
        self._devices = {node: Device(folder / node, checks) for nodes in NODES.values() for node in nodes}
        self._lock, self._is_fenced = threading.Lock(), False
        self._done = folder / f"{job}.step"
        first = rng.choice((["r0"], ["r1"], ["r0", "r1"]))
        self.nodes = {"rollout": first, "train": NODES["train"]}

    def run(self, address: str) -> None:
        mux = self._connect(address)
        mux.members([this_process()])
        if self._checks:
            mux.guard(self._keep_off)
        self._phase(mux, "init", 0)
        step = int(self._done.read_text()) if self._done.exists() else 0
        while not any((self._folder / name).exists() for name in ("enough", f"{self._job}.enough")):
            step += 1
            for phase in ("rollout", "train"):
                self._phase(mux, phase, step)
            self._finish(mux, step)
            if self._rng.random() < 0.3:
                self._connect(address).close()  # one more client of the same job, as a worker's
        self._leave(mux)

    def _connect(self, address: str) -> LocalMux:
        return connect(address, self._job, self.nodes, timeout=120.0)

    def _leave(self, mux: LocalMux) -> None:
        """As a job that is done, or as one that gives nothing back and ends."""
        if self._rng.random() < 0.5:
            mux.close()
        else:
            mux.fail("it had enough")
        self.ledger.write("closed")

    def _phase(self, mux: LocalMux, phase: str, step: int) -> None:
        asked = time.monotonic()
        lease = self._acquire(mux, phase, step)
        self.ledger.write("granted", token=lease.token, nodes=lease.nodes, step=step, asked_at=asked)
        self._use(mux, lease)
        released = time.monotonic()
        self.ledger.write("released", token=lease.token, nodes=lease.nodes, step=step)
        mux.release(lease)
        self.ledger.write("answered", token=lease.token, asked_at=released)
        if self._rng.random() < 0.1:
            self._come_late(lease)

    def _acquire(self, mux: LocalMux, phase: str, step: int) -> Lease:
        """Now and then it does not want to wait any more, and asks anew."""
        if self._rng.random() < 0.1:
            signal.setitimer(signal.ITIMER_REAL, self._rng.uniform(0.005, 0.2))
            try:
                return mux.acquire(phase, step=step)
            except _Impatient:
                pass
            except RuntimeError as error:
                # A handler that raises while a condition gives its lock up makes Python say so, and not what was raised.
                if not isinstance(error.__context__, _Impatient):
                    raise
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        return mux.acquire(phase, step=step)

    def _use(self, mux: LocalMux, lease: Lease) -> None:
        mux.note("use")
        for part in range(3):
            self._map(mux, lease)
            time.sleep(self._rng.uniform(0.005, 0.04))
            mux.progress(part + 1, 3)
            mux.memory(lease.nodes[0], {"weights": part})
            mux.host_memory(lease.nodes[0], {"copies": part})
        if len(lease.nodes) > 1 and self._rng.random() < 0.5:
            self._unmap(lease.nodes[1:])
            lease = mux.shrink(lease, lease.nodes[1:])
            time.sleep(self._rng.uniform(0.005, 0.04))
        self._unmap(lease.nodes)

    def _keep_off(self) -> None:
        """As an engine that falls asleep; in a thread of the client's."""
        with self._lock:
            self._is_fenced = True
        self._unmap(list(self._devices))
        self.ledger.write("fenced")

    def _map(self, mux: LocalMux, lease: Lease) -> None:
        """What is not mapped yet, or not any more, as soon as it may be."""
        while True:
            with self._lock:
                self._is_fenced = False
            if self._checks:
                mux.wait_until_usable()
            with self._lock:
                if not self._is_fenced:
                    return self._map_now(lease)

    def _map_now(self, lease: Lease) -> None:
        for node in lease.nodes:
            if wrong := self._devices[node].map(lease.token):
                self.ledger.write(wrong, token=lease.token, nodes=[node])

    def _unmap(self, nodes: list[str]) -> None:
        with self._lock:
            for node in nodes:
                self._devices[node].unmap()

    def _come_late(self, lease: Lease) -> None:
        time.sleep(_LATE_S)
        for node in lease.nodes:
            if self._devices[node].takes_stale(lease.token):
                self.ledger.write("late use", token=lease.token, nodes=[node])

    def _finish(self, mux: LocalMux, step: int) -> None:
        mux.report_step(step, {"reward": 1.0})
        half = self._done.with_suffix(".half")
        half.write_text(str(step))
        self.ledger.write("step", step=step)
        half.replace(self._done)


if __name__ == "__main__":
    main()
