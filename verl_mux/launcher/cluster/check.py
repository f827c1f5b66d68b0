"""`verl-mux doctor --cluster FILE`: can jobs run on the hosts of a run file? One row a host."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from verl_mux.errors import Failure
from verl_mux.launcher.cluster.look import PACKAGES
from verl_mux.launcher.cluster.reach import HostSpec, python_of, words

_ANSWER_S = 60.0
_ROUNDS = 5
# Leases are measured by clocks that only go forward; the event log's times are compared across hosts.
_MOST_SKEW_S = 1.0


@dataclass
class Seen:
    """A host as it was found. `about`: see look.py, empty where it was not reached; `skew_s`: its clock before ours, give or take
    `within_s`; `wrong`: what keeps jobs from running there, `odd`: what may slow them down."""

    host: str
    about: dict[str, Any] = field(default_factory=dict)
    skew_s: float = 0.0
    within_s: float = 0.0
    wrong: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)


def check(hosts: Mapping[str, HostSpec], gpus: Mapping[str, int], towards: str, without_gpus: bool) -> list[Seen]:
    """All hosts at once. `gpus`: how many each host's nodes have; `towards`: where they reach the coordinator;
    `without_gpus`: the jobs run on CPUs, and GPUs are a number for Ray."""
    with ThreadPoolExecutor(max_workers=len(hosts)) as pool:
        seen = list(pool.map(lambda item: look_at(item[0], item[1], towards), hosts.items()))
    reached = [one for one in seen if one.about]
    for one in reached:
        judge(one, reached[0], 0 if without_gpus else gpus.get(one.host, 0))
    return seen


def look_at(name: str, host: HostSpec, towards: str) -> Seen:
    seen = Seen(name)
    command = words(name, host, [python_of(host), "-m", "verl_mux.launcher.cluster.look"])
    try:
        _ask(command, towards, seen)
    except (OSError, Failure, ValueError) as error:
        seen.wrong.append(f"not reached: {error}")
    return seen


def _ask(command: list[str], towards: str, seen: Seen) -> None:
    """The clock in several rounds, of which the quickest counts."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout and process.stderr
        errors: list[str] = []
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
        complaints = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
        complaints.start()
        try:
            rounds = []
            for number in range(_ROUNDS):
                began = time.time()
                with contextlib.suppress(OSError):
                    process.stdin.write(f"{towards}\n")
                    process.stdin.flush()
                answer = _answer(lines)
                ended = time.time()
                if answer is None:
                    raise Failure(_last_words(process, complaints, errors))
                if number == 0:
                    seen.about = answer
                else:
                    rounds.append((ended - began, answer["time"] - (began + ended) / 2))
            width, seen.skew_s = min(rounds)
            seen.within_s = width / 2
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()
            process.kill()


def _pump(stdout, lines: queue.SimpleQueue[str]) -> None:
    for line in stdout:
        if line.startswith("{"):  # else what a login shell over there says
            lines.put(line)
    lines.put("")


def _answer(lines: queue.SimpleQueue[str]) -> dict[str, Any] | None:
    """None: there will be none any more. Raises Failure for none in time."""
    try:
        line = lines.get(timeout=_ANSWER_S)
    except queue.Empty:
        raise Failure(f"no answer in {_ANSWER_S:g} s") from None
    return json.loads(line) if line else None


def _last_words(process: subprocess.Popen, complaints: threading.Thread, errors: list[str]) -> str:
    process.wait()
    complaints.join(_ANSWER_S)  # what it left running may hold its stderr open
    said = next((text.strip() for text in reversed(errors) if text.strip()), "it said nothing")
    return f"exit code {process.returncode}: {said}"


def judge(seen: Seen, like: Seen, gpus: int) -> None:
    """What is wrong with a host that was reached. `like`: the host whose versions all must have. Pure."""
    about = seen.about
    if about["free_blocks"] == 0:
        seen.wrong.append("no block of ports is free")
    if abs(seen.skew_s) - seen.within_s > _MOST_SKEW_S:
        seen.wrong.append(f"its clock is {seen.skew_s:+.1f} s off")
    for package in ("python", *PACKAGES):
        here, there = about["versions"].get(package), like.about["versions"].get(package)
        if here is None:
            seen.wrong.append(f"{package} is not installed")
        elif here != there and there is not None:
            seen.wrong.append(f"{package} {here}, on {like.host} {there}")
    if gpus > len(about["gpus"]):
        seen.wrong.append(f"{len(about['gpus'])} GPUs, its nodes have {gpus}")
    if about["address"] is None:
        seen.wrong.append("no way to the coordinator's address")
    elif (about["name_is"] or "127.").startswith("127."):
        seen.odd.append(f"its own name stands for {about['name_is']}: name its address in /etc/hosts")
    if about["interfaces"] and not any(entry["mbit_per_s"] >= 10_000 for entry in about["interfaces"].values()):
        seen.odd.append("no interface is known to have 10 Gb/s")


def as_json(seen: list[Seen]) -> dict[str, Any]:
    return {"ok": not any(one.wrong for one in seen), "hosts": [asdict(one) for one in seen]}


def show(seen: list[Seen], console: Console) -> None:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in ("host", "address", "clock", "GPUs", "network", "ports", *PACKAGES, "python"):
        table.add_column(column)
    for one in seen:
        table.add_row(*_row(one))
    console.print(table)
    for one in seen:
        for text in one.wrong:
            console.print(f"[red]bad [/] {one.host}: {text}", soft_wrap=True, highlight=False)
        for text in one.odd:
            console.print(f"[yellow]note[/] {one.host}: {text}", soft_wrap=True, highlight=False)


def _row(one: Seen) -> list[str]:
    if not one.about:
        return [one.host, *["-"] * (6 + len(PACKAGES))]
    about = one.about
    network = ", ".join(f"{name} {_speed(entry['mbit_per_s'])}" for name, entry in about["interfaces"].items())
    versions = [about["versions"].get(name) or "-" for name in (*PACKAGES, "python")]
    clock = f"{1000 * one.skew_s:+.0f} ms"
    return [
        one.host,
        about["address"] or "-",
        clock,
        str(len(about["gpus"])),
        network or "-",
        str(about["free_blocks"]),
        *versions,
    ]


def _speed(mbit: int) -> str:
    return "?" if mbit <= 0 else f"{mbit / 1000:g} Gb/s"
