"""Hosts with links between them, out of network namespaces: each with one interface of its own on one of two bridges.

    trainers' bridge ===(joint: the one slow link, if all share it)=== rollout hosts' bridge

`fast` is what each interface lets out (htb in the host, default class) and in (tbf at the bridge's end of it). `slow` is a
class for each rollout host in each trainer's htb (one slow link per pair), or a tbf on the joint. Called by sync_bench.py and
group.py; touches network namespaces and needs root.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from typing import NamedTuple

from verl_mux.errors import UserError

# Large packets, as networks for this have: their headers are below a thousandth.
_MTU = 65535
_BURST = f"burst {192 << 10}"


class Shape(NamedTuple):
    """bytes per second; `slow_link`: "per_pair" or "shared"."""

    fast: float
    slow: float
    slow_link: str


class Bed:
    """`trainers`, `hosts`: addresses, by name of the namespace."""

    kind = "netns"

    def __init__(self, trainers: int, hosts: int, shape: Shape) -> None:
        self._mark = f"vmx{secrets.token_hex(2)}"
        self._shape = shape
        self.trainers = {f"{self._mark}t{at}": f"10.91.0.{at + 1}" for at in range(trainers)}
        self.hosts = {f"{self._mark}h{at}": f"10.91.1.{at + 1}" for at in range(hosts)}

    def __enter__(self) -> Bed:
        try:
            self._bridges()
            for at, (name, address) in enumerate(self.trainers.items()):
                self._host(name, address, f"{self._mark}a", f"{self._mark}p{at}")
                self._slow_pairs(name)
            for at, (name, address) in enumerate(self.hosts.items()):
                self._host(name, address, f"{self._mark}b", f"{self._mark}q{at}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self.trainers, *self.hosts):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        for end in ("a", "b", "j"):
            subprocess.run(["ip", "link", "del", self._mark + end], capture_output=True, check=False)

    def inside(self, name: str) -> list[str]:
        """The words before a command that is to run there."""
        return ["ip", "netns", "exec", name]

    def crossed(self) -> int:
        """Bytes that the joint has carried from trainers to rollout hosts, with all headers, by its own counter."""
        with open(f"/sys/class/net/{self._mark}j/statistics/tx_bytes", encoding="ascii") as file:
            return int(file.read())

    def _bridges(self) -> None:
        mark = self._mark
        for end in ("a", "b"):
            _ip(f"link add {mark}{end} type bridge")
            _ip(f"link set {mark}{end} up mtu {_MTU}")
        _ip(f"link add {mark}j type veth peer name {mark}k")
        for joint, bridge in (("j", "a"), ("k", "b")):
            _ip(f"link set {mark}{joint} mtu {_MTU} master {mark}{bridge} up")
        if self._shape.slow_link == "shared":
            _tc(f"qdisc add dev {mark}j root tbf rate {_rate(self._shape.slow)} {_BURST} limit 4mb")

    def _host(self, name: str, address: str, bridge: str, port: str) -> None:
        _ip(f"netns add {name}")
        _ip(f"link add {port} type veth peer name eth0 netns {name}")
        _ip(f"link set {port} mtu {_MTU} master {bridge} up")
        for words in (f"addr add {address}/16 dev eth0", f"link set eth0 mtu {_MTU} up", "link set lo up"):
            _ip(words, name)
        fast = _rate(self._shape.fast)
        _tc(f"qdisc add dev {port} root tbf rate {fast} {_BURST} limit 8mb")
        _tc("qdisc add dev eth0 root handle 1: htb default 1", name)
        _tc(f"class add dev eth0 parent 1: classid 1:1 htb rate {fast} {_BURST} c{_BURST} quantum 65535", name)

    def _slow_pairs(self, name: str) -> None:
        if self._shape.slow_link != "per_pair":
            return
        for at, address in enumerate(self.hosts.values(), start=16):
            rate = f"htb rate {_rate(self._shape.slow)} {_BURST} c{_BURST} quantum 65535"
            _tc(f"class add dev eth0 parent 1: classid 1:{at:x} {rate}", name)
            _tc(f"filter add dev eth0 parent 1: protocol ip prio 1 u32 match ip dst {address}/32 flowid 1:{at:x}", name)


def can_shape() -> str | None:
    """None: hosts with shaped links can be made here; else what lacks."""
    if os.geteuid() != 0:
        return "root"
    try:
        with Bed(1, 1, Shape(1e7, 1e6, "per_pair")), Bed(1, 1, Shape(1e7, 1e6, "shared")):
            return None
    except UserError as error:
        return str(error)


def _rate(bytes_per_second: float) -> str:
    return f"{round(bytes_per_second * 8)}bit"


def _ip(words: str, inside: str | None = None) -> None:
    _run(["ip", *(["-n", inside] if inside else []), *words.split()])


def _tc(words: str, inside: str | None = None) -> None:
    _run(["tc", *(["-n", inside] if inside else []), *words.split()])


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(f"{command[0]} (iproute2)") from None
    if done.returncode:
        raise UserError(f"{' '.join(command)}: {done.stderr.strip()}")
