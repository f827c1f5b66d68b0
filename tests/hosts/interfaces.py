"""What the hosts' interfaces count while a run goes, and how much of it was weights.

`python -m tests.hosts.interfaces FILE [BED]` writes the counters of each host's own interface every 20 ms, as the kernel of that
host gives them, until it is ended. Such a file beside the event log of a job says what each host received in each sync.
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
# Seconds of a look beside a sync, before and after it, with a gap that the sync's own edges may fill.
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


class Counters:
    """Of one host's interface: bytes received so far at each look."""

    def __init__(self, times: Sequence[float], received: Sequence[int]) -> None:
        self._times, self._received = times, received

    def between(self, start: float, end: float) -> tuple[int, float]:
        """Bytes and seconds from the last look before `start` to the first after `end`. Raises ValueError: there is none."""
        first, last = bisect_right(self._times, start) - 1, bisect_left(self._times, end)
        if first < 0 or last == len(self._times):
            raise ValueError(f"the counters were not looked at from {start} to {end}")
        return self._received[last] - self._received[first], self._times[last] - self._times[first]

    def of(self, start: float, end: float) -> tuple[int, float]:
        """Bytes of a sync, and what there would have been without one, by the busier of the times before and after."""
        nbytes, seconds = self.between(start, end)
        beside = [(start - _GAP_S - _BESIDE_S, start - _GAP_S), (end + _GAP_S, end + _GAP_S + _BESIDE_S)]
        return nbytes, max(moved / took for moved, took in (self.between(*span) for span in beside)) * seconds


def read(file: Path) -> dict[str, Counters]:
    """By host."""
    looks: dict[str, tuple[list[float], list[int]]] = {}
    for line in whole_lines(file):
        look = json.loads(line)
        for values, value in zip(looks.setdefault(look["host"], ([], [])), (look["time"], look["rx"]), strict=True):
            values.append(value)
    return {host: Counters(*columns) for host, columns in looks.items()}


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
        apart = {host: _over(*it, sync.model_bytes) for host, it in by_host.items() if host not in trainers}
        of_all = (sum(values) for values in zip(*by_host.values(), strict=True))
        found.append({"version": sync.version, "seconds": sync.end - sync.start, "model_bytes": sync.model_bytes,
                      "copies": apart, "over_sent": _over(*of_all, sync.between_hosts)})  # fmt: skip
    return found


def _over(nbytes: float, idle: float, wanted: float) -> dict[str, float]:
    return {"counted": nbytes / wanted, "less_idle": (nbytes - idle) / wanted, "idle_share": idle / nbytes}


def weights_bytes(safetensors: Path) -> int:
    """What its tensors hold, without its header."""
    with safetensors.open("rb") as file:
        return safetensors.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def summary(found: Sequence[Mapping]) -> dict[str, dict[str, float]]:
    """Medians over all syncs, and the most."""
    looks = {"copies": [it for each in found for it in each["copies"].values()], "over_sent": [it["over_sent"] for it in found]}
    return {
        name: {
            "least_counted": min(it["counted"] for it in each),
            "less_idle": median(it["less_idle"] for it in each),
            "most_less_idle": max(it["less_idle"] for it in each),
            "idle_share": median(it["idle_share"] for it in each),
        }
        for name, each in looks.items()
        if each
    }


def bytes_received(table: str, interface: str = "eth0") -> int:
    """Of one interface, from a table as in /proc/net/dev."""
    rows = (line.partition(":") for line in table.splitlines())
    return next(int(numbers.split()[0]) for name, _, numbers in rows if name.strip() == interface)


def main() -> None:
    from bed import NAME, Bed

    file, bed = Path(sys.argv[1]), Bed(sys.argv[2] if len(sys.argv) > 2 else NAME)
    with file.open("w", buffering=1) as out:
        while True:
            for name, host in bed.hosts().items():
                with contextlib.suppress(OSError, StopIteration):  # not whole yet, or gone
                    table = Path(f"/proc/{host.pid}/net/dev").read_text()  # of the network that the process is in
                    out.write(json.dumps({"time": time.time(), "host": name, "rx": bytes_received(table)}) + "\n")
            time.sleep(EVERY_S)


if __name__ == "__main__":
    main()
