"""What the hosts' interfaces count while a run goes, and how much of it was weights.

`python -m tests.hosts.interfaces FILE [BED]` writes the counters of each host's own interface every 20 ms, as the kernel of that
host tells them, until it is ended. Such a file beside the event log of a job says what each host received in each sync.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.hosts.conftest import EXAMPLE  # noqa: F401  (finds `bed`)

EVERY_S = 0.02
# Beside a sync: so long before and after it, with a gap that its own edges may fill.
_BESIDE_S, _GAP_S = 0.5, 0.05


@dataclass(frozen=True)
class Sync:
    """One of a job, as its event log has it: epoch seconds, bytes between hosts with headers; and what the model's file holds, as
    what trainers send depends on the way: each its part to every host, or to the first of them, which hands it on."""

    version: int
    start: float
    end: float
    model_bytes: int
    between_hosts: float

    @classmethod
    def of(cls, event: Mapping, ended: float, model_bytes: int) -> Sync:
        it = event["extra"]
        return cls(it["version"], ended - event["duration_sec"], ended, model_bytes, it["slow_bytes"] + it["fast_bytes"])


@dataclass(frozen=True)
class Received:
    """`nbytes`: that the interface counted from the last look before a sync to the first after it; `idle`: what it would have
    without one, by the busier of the times before and after."""

    nbytes: int
    idle: float


class Counters:
    """Of one host's interface: bytes received so far at each look."""

    def __init__(self, times: Sequence[float], received: Sequence[int]) -> None:
        self._times, self._received = times, received

    def between(self, start: float, end: float) -> tuple[int, float]:
        """Bytes and seconds from the last look before `start` to the first after `end`.

        Raises ValueError: nobody looked before, or after.
        """
        first, last = bisect_right(self._times, start) - 1, bisect_left(self._times, end)
        if first < 0 or last == len(self._times):
            raise ValueError(f"the counters were not looked at from {start} to {end}")
        return self._received[last] - self._received[first], self._times[last] - self._times[first]

    def of(self, start: float, end: float) -> Received:
        """Of a sync."""
        nbytes, seconds = self.between(start, end)
        beside = [(start - _GAP_S - _BESIDE_S, start - _GAP_S), (end + _GAP_S, end + _GAP_S + _BESIDE_S)]
        rates = [moved / took for moved, took in (self.between(*span) for span in beside)]
        return Received(nbytes, max(rates) * seconds)


def read(file: Path) -> dict[str, Counters]:
    """By host."""
    times: dict[str, list[float]] = {}
    received: dict[str, list[int]] = {}
    for line in whole_lines(file):
        look = json.loads(line)
        times.setdefault(look["host"], []).append(look["time"])
        received.setdefault(look["host"], []).append(look["rx"])
    return {host: Counters(times[host], received[host]) for host in times}


def whole_lines(file: Path) -> list[str]:
    """Without the last one of a sampler that was ended in it."""
    return [line for line in file.read_text().splitlines() if line.endswith("}")]


def copies(syncs: Iterable[Sync], counters: Mapping[str, Counters], hosts: Sequence[str], trainers: Sequence[str]) -> list[dict]:
    """Of each sync: models that came in through the interface of each rollout host that no trainer rank runs on, and what came in
    through those of all rollout hosts together, over what the job says that it sent between hosts. Each as it was counted, and
    less what the interface would have counted without a sync.

    What a rank sends to a worker of its own host goes through no interface.
    """
    found = []
    for sync in syncs:
        by_host = {host: counters[host].of(sync.start, sync.end) for host in hosts}
        all_of_them = Received(sum(it.nbytes for it in by_host.values()), sum(it.idle for it in by_host.values()))
        apart = {host: _over(it, sync.model_bytes) for host, it in by_host.items() if host not in trainers}
        seconds = sync.end - sync.start
        found.append({"version": sync.version, "seconds": seconds, "model_bytes": sync.model_bytes, "copies": apart,
                      "over_sent": _over(all_of_them, sync.between_hosts)})  # fmt: skip
    return found


def _over(received: Received, wanted: float) -> dict[str, float]:
    counted = received.nbytes / wanted
    return {"counted": counted, "less_idle": counted - received.idle / wanted, "idle_share": received.idle / received.nbytes}


def weights_bytes(safetensors: Path) -> int:
    """What its tensors hold, without its header."""
    with safetensors.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return safetensors.stat().st_size - 8 - header


def summary(found: Sequence[Mapping]) -> dict[str, dict[str, float]]:
    """Medians over all syncs, and the most."""
    looks = {
        "copies": [its for each in found for its in each["copies"].values()],
        "over_sent": [each["over_sent"] for each in found],
    }
    return {
        name: {
            "least_counted": min(it["counted"] for it in its),
            "less_idle": median(it["less_idle"] for it in its),
            "most_less_idle": max(it["less_idle"] for it in its),
            "idle_share": median(it["idle_share"] for it in its),
        }
        for name, its in looks.items()
        if its
    }


def bytes_received(table: str, interface: str = "eth0") -> int:
    """Of one interface, from a table as in /proc/net/dev."""
    rows = (line.partition(":") for line in table.splitlines())
    return next(int(numbers.split()[0]) for name, _, numbers in rows if name.strip() == interface)


def _look(host: str, pid: int) -> dict:
    """A process's own /proc has the counters of the network that it is in."""
    return {"time": time.time(), "host": host, "rx": bytes_received(Path(f"/proc/{pid}/net/dev").read_text())}


def main() -> None:
    from bed import NAME, Bed

    file, bed = Path(sys.argv[1]), Bed(sys.argv[2] if len(sys.argv) > 2 else NAME)
    with file.open("w", buffering=1) as out:
        while True:
            for name, host in bed.hosts().items():
                with contextlib.suppress(OSError, StopIteration):  # not whole yet, or gone
                    out.write(json.dumps(_look(name, host.pid)) + "\n")
            time.sleep(EVERY_S)


if __name__ == "__main__":
    main()
