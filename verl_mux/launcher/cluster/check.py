"""`verl-mux doctor --cluster FILE`: can jobs run on the hosts of a run file? One row a host."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from socket import AF_INET
from typing import IO, Any

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_mux.errors import Failure
from verl_mux.launcher.cluster.look import PACKAGES, listen
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


def check(
    hosts: Mapping[str, HostSpec],
    gpus: Mapping[str, int],
    towards: str,
    without_gpus: bool,
    shared: Path | None = None,
    at: tuple[str, int] | None = None,
) -> list[Seen]:
    """All hosts at once.

    Args:
        gpus: how many each host's nodes have.
        towards: this machine, or the coordinator's, as the hosts reach it.
        without_gpus: the jobs run on CPUs, and GPUs are a number for Ray.
        shared: a folder that all must see.
        at: where a coordinator listens already; without it one is to listen here, on `towards`.

    Raises:
        Failure: `towards` is no address of this machine, or `shared` cannot be written.
    """
    coordinator = at or (towards, _listen_here(towards))
    with contextlib.ExitStack() as until, ThreadPoolExecutor(max_workers=len(hosts)) as pool:
        looks = [until.enter_context(Look(name, host)) for name, host in hosts.items()]
        list(pool.map(lambda look: look.begin(towards), looks))
        reached = [look for look in looks if look.seen.about]
        places = {look.seen.host: (look.address, look.seen.about["port"]) for look in reached}
        names = {"the coordinator": coordinator, **places}
        file = until.enter_context(_made_file(shared)) if shared is not None else None
        list(pool.map(lambda look: look.go_on(names, file, shared is not None and shared.is_dir()), reached))
    for look in reached:
        judge(look.seen, reached[0].seen, 0 if without_gpus else gpus.get(look.seen.host, 0), look.host.address)
    return [look.seen for look in looks]


def _listen_here(address: str) -> int:
    try:
        return listen(address)
    except OSError as error:
        own = sorted(entry.address for entries in psutil.net_if_addrs().values() for entry in entries if entry.family == AF_INET)
        raise Failure(f"`bind` is {address}: {os.strerror(error.errno or 0)}; this machine has {', '.join(own)}") from None


@contextlib.contextmanager
def _made_file(folder: Path) -> Iterator[str]:
    """A file in the folder, or where that is yet to be made, in the nearest one above it."""
    there = next(above for above in (folder, *folder.parents) if above.is_dir())
    try:
        with tempfile.NamedTemporaryFile(prefix=".verl_mux_doctor_", dir=there) as file:
            yield file.name
    except OSError as error:
        raise Failure(f"`dir` is {folder}: nothing can be written to {there} here: {error.strerror}") from None


class Look:
    """look.py on one host. `begin` -> `go_on`; within a `with`, at whose end it is over. What fails stands in `seen.wrong`."""

    def __init__(self, name: str, host: HostSpec) -> None:
        self.seen, self.host = Seen(name), host
        self._command = words(name, host, [python_of(host), "-m", "verl_mux.launcher.cluster.look"])
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._errors: list[str] = []

    def __enter__(self) -> Look:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def address(self) -> str | None:
        """Where the other hosts are to reach it."""
        return self.host.address or self.seen.about["address"]

    def begin(self, towards: str) -> None:
        """All about it, and its clock in several rounds, of which the quickest counts."""
        try:
            self._start()
            about = self._ask(towards=towards)
            rounds = []
            for _ in range(_ROUNDS):
                began = time.time()
                answer = self._ask()
                ended = time.time()
                rounds.append((ended - began, answer["time"] - (began + ended) / 2))
        except (OSError, Failure, ValueError) as error:
            self.seen.wrong.append(f"not reached: {error}")
            return
        width, self.seen.skew_s = min(rounds)
        self.seen.about, self.seen.within_s = about, width / 2

    def go_on(self, others: Mapping[str, tuple[str | None, int]], file: str | None, dir_is_there: bool) -> None:
        """Whether it reaches the others, by name, and sees a file; a `dir` that is yet to be made may be mounted by then."""
        targets = {name: place for name, place in others.items() if name != self.seen.host and place[0] is not None}
        try:
            answer = self._ask(reach=list(targets.values()), sees=file or "/")
        except (OSError, Failure, ValueError) as error:
            self.seen.wrong.append(f"not reached any more: {error}")
            return
        reasons = {(address, port): reason for address, port, reason in answer["unreached"]}
        for name, place in targets.items():
            if place in reasons:
                self.seen.wrong.append(f"{name} is not reached from there at {place[0]}:{place[1]}: {reasons[place]}")
        if not answer["sees"]:
            text = f"it does not see {file}, which was just written here: `dir` must be on a file system of all hosts"
            (self.seen.wrong if dir_is_there else self.seen.odd).append(text)

    def _start(self) -> None:
        pipe = subprocess.PIPE
        self._process = process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        threading.Thread(target=self._pump, args=(process.stdout,), daemon=True).start()
        self._complaints = threading.Thread(target=lambda: self._errors.extend(process.stderr or ()), daemon=True)
        self._complaints.start()

    def _pump(self, stdout: IO[str]) -> None:
        for line in stdout:
            if line.startswith("{"):  # else what a login shell over there says
                self._lines.put(line)
        self._lines.put("")

    def _ask(self, **question: Any) -> dict[str, Any]:
        """Raises Failure for no answer in time, or none any more."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        try:
            line = self._lines.get(timeout=_ANSWER_S)
        except queue.Empty:
            raise Failure(f"no answer in {_ANSWER_S:g} s") from None
        if not line:
            raise Failure(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        self._complaints.join(_ANSWER_S)  # what it left running may hold its stderr open
        said = next((text.strip() for text in reversed(self._errors) if text.strip()), "it said nothing")
        return f"exit code {code}: {said}"


def judge(seen: Seen, like: Seen, gpus: int, address: str | None = None) -> None:
    """What is wrong with a host that was reached. `like`: the host whose versions all must have; `address`: what the run file
    says. Pure."""
    about = seen.about
    own = [entry["address"] for entry in about["interfaces"].values()]
    if address is not None and address not in (*own, about["address"]):
        seen.wrong.append(f"`address` is {address}; it has {', '.join(own) or 'none'}")
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
    for column in ("host", "address", "clock", "GPUs", "network", "ports"):
        table.add_column(column, no_wrap=column != "network", overflow="fold")
    for one in seen:
        table.add_row(*_row(one))
    console.print(table)
    versions = {tuple(one.about["versions"].items()) for one in seen if one.about}
    if len(versions) == 1:
        console.print(
            "all have " + ", ".join(f"{name} {found or '-'}" for name, found in versions.pop()), soft_wrap=True, highlight=False
        )
    for one in seen:
        for text in one.wrong:
            console.print(f"[red]bad [/] {one.host}: {escape(text)}", soft_wrap=True, highlight=False)
        for text in one.odd:
            console.print(f"[yellow]note[/] {one.host}: {escape(text)}", soft_wrap=True, highlight=False)


def _row(one: Seen) -> list[str]:
    if not one.about:
        return [one.host, *["-"] * 5]
    about = one.about
    network = ", ".join(f"{name} {_speed(entry['mbit_per_s'])}" for name, entry in about["interfaces"].items())
    clock = f"{1000 * one.skew_s:+.0f} ms"
    return [one.host, about["address"] or "-", clock, str(len(about["gpus"])), network or "-", str(about["free_blocks"])]


def _speed(mbit: int) -> str:
    return "?" if mbit <= 0 else f"{mbit / 1000:g} Gb/s"
