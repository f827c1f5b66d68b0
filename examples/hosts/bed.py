"""Several hosts on one machine, by Linux namespaces: python bed.py make hosta hostb; python bed.py enter hosta COMMAND...

Each host has a network of its own (one interface on a bridge, an address), a host name, process ids, /proc, /tmp and /dev/shm;
the rest of the file system is shared, as a cluster's is. What runs on a host runs below its first process and ends with it.
Nothing leaves the machine. Needs root and Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

NAME, SUBNET = "mux", "10.77.0"
_STATE = Path("/run/verl_mux_bed")
# The machine's own place on the bridge; hosts count from 1.
_MACHINE = 254
# Mount, UTS, IPC, process ids, network; see unshare(2).
_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000


class BedError(Exception):
    """In one line, for a person."""


@dataclass(frozen=True)
class Host:
    """`pid`: its first process, as the machine sees it; `started`: that one's start in clock ticks; `link`: its interface's
    other end, on the machine."""

    name: str
    address: str
    link: str
    pid: int
    started: int


class Bed:
    """Some hosts under one name. `make` -> `enter`, `link` -> `unmake`, which ends all that runs on them.

    Args:
        subnet: the first three numbers of their addresses; two beds at a time need two of them.
    """

    def __init__(self, name: str = NAME, subnet: str = SUBNET) -> None:
        self.name, self.subnet = name, subnet
        self.address = f"{subnet}.{_MACHINE}"  # the machine's own
        self._file = _STATE / f"{name}.json"
        self._bridge = f"{name[:11]}-br"

    def make(self, names: Sequence[str], shared: Sequence[str | Path] = ()) -> dict[str, Host]:
        """`shared`: folders below /tmp that all hosts see, besides this program and its Python. An earlier bed of this name is
        unmade before.

        Raises:
            BedError: not root, or the kernel does not let it.
        """
        require_root()
        self.unmake()
        shared = _outermost([*shared, sys.prefix, Path(__file__).parents[2]])
        addresses = {name: f"{self.subnet}.{number}" for number, name in enumerate(names, start=1)}
        hosts: dict[str, Host] = {}
        try:
            _run("ip", "link", "add", self._bridge, "type", "bridge")
            _run("ip", "addr", "add", f"{self.address}/24", "dev", self._bridge)
            _run("ip", "link", "set", self._bridge, "up")
            for number, (name, address) in enumerate(addresses.items(), start=1):
                folder = self._folder / name
                _lay_out(folder, {**addresses, "machine": self.address}, shared)
                hosts[name] = _start(name, address, f"{self._bridge[:-3]}-{number}", folder)
                self._keep(hosts)  # at once: what is noted can be unmade
                self._connect(hosts[name])
        except BaseException:
            self.unmake()
            raise
        return hosts

    def unmake(self) -> None:
        """Everything that runs on the hosts ends, and they are gone. Nothing happens where there are none."""
        for host in self.hosts().values():
            if host.started == _started(host.pid):
                os.kill(host.pid, signal.SIGKILL)  # the kernel then kills all processes of the namespace
                _wait_gone(host)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._file.unlink(missing_ok=True)

    def hosts(self) -> dict[str, Host]:
        """Those that were made under this name."""
        try:
            return {name: Host(**host) for name, host in json.loads(self._file.read_text()).items()}
        except (OSError, ValueError):
            return {}

    def enter(self, host: str) -> list[str]:
        """The words to put before a command so that it runs there.

        Raises:
            BedError: there is no such host.
        """
        found = self.hosts().get(host)
        if found is None or found.started != _started(found.pid):
            raise BedError(f"there is no host {host!r} in bed {self.name!r}; there are {', '.join(self.hosts()) or 'none'}")
        return ["nsenter", "-t", str(found.pid), "-m", "-u", "-i", "-n", "-p", "--"]

    def link(self, host: str, up: bool) -> None:
        """Plug the host's network cable in, or out."""
        _run("ip", "link", "set", self.hosts()[host].link, "up" if up else "down")

    def __enter__(self) -> Bed:
        return self

    def __exit__(self, *_: object) -> None:
        self.unmake()

    @property
    def _folder(self) -> Path:
        return Path("/var/tmp/verl_mux_bed") / self.name

    def _keep(self, hosts: dict[str, Host]) -> None:
        _STATE.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps({name: asdict(host) for name, host in hosts.items()}))

    def _connect(self, host: Host) -> None:
        _run("ip", "link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
        _run("ip", "link", "set", host.link, "master", self._bridge, "up")
        inside = ["nsenter", "-t", str(host.pid), "-n", "ip"]
        _run(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "link", "set", "eth0", "up")
        # Leads nowhere, but programs ask which of their addresses faces the world.
        _run(*inside, "route", "add", "default", "via", self.address)


def require_root() -> None:
    """Raises BedError."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        raise BedError("making hosts out of namespaces needs Linux and root; run it as root")
    if missing := [name for name in ("ip", "nsenter") if shutil.which(name) is None]:
        raise BedError(f"making hosts out of namespaces needs the command {missing[0]!r} (iproute2, util-linux)")


def _outermost(paths: Sequence[str | Path]) -> list[Path]:
    """Those that lie in none of the others."""
    found = dict.fromkeys(Path(path).resolve() for path in paths)
    return [path for path in found if found.keys().isdisjoint(path.parents)]


def _lay_out(folder: Path, names: dict[str, str], shared: Sequence[Path]) -> None:
    """What the host has to itself: `tmp`, with the places of shared folders in it, and `hosts`."""
    (folder / "tmp").mkdir(parents=True)
    (folder / "tmp").chmod(0o1777)
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for n, a in names.items()))
    for path in shared:
        if Path("/tmp") not in path.parents:
            continue  # seen by all as it is
        path.mkdir(parents=True, exist_ok=True)
        (folder / "tmp" / path.relative_to("/tmp")).mkdir(parents=True)
    (folder / "shared").write_text("\n".join(map(str, shared)))


def _start(name: str, address: str, link: str, folder: Path) -> Host:
    """The host's first process, with namespaces of its own."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        _between(name, folder, writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        report = pipe.read().split("\n", 1)
    os.waitpid(between, 0)
    if len(report) < 2 or report[1].strip() != "ready":
        raise BedError(f"cannot make host {name!r}: {''.join(report[1:]).strip() or report[0] or 'its first process died'}")
    pid = int(report[0])
    return Host(name, address, link, pid, _started(pid))


def _between(name: str, folder: Path, pipe: int) -> None:
    """In the process between: new namespaces take its child in; it says which process that is. Never returns."""
    try:
        os.setsid()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_NAMESPACES) != 0:
            raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
        if first := os.fork():
            os.write(pipe, f"{first}\n".encode())
            os._exit(0)
        _be_first(name, folder, pipe)
    except BaseException as error:
        os.write(pipe, f"\n{error}\n".encode())
    os._exit(1)


def _be_first(name: str, folder: Path, pipe: int) -> None:
    """The host's first process: lays out its file system, then is the parent of those who lost theirs."""
    os.chdir("/")
    _run("mount", "--make-rprivate", "/")
    for path in filter(None, (folder / "shared").read_text().splitlines()):
        if Path("/tmp") in Path(path).parents:
            _run("mount", "--bind", path, str(folder / "tmp" / Path(path).relative_to("/tmp")))
    _run("mount", "--bind", str(folder / "hosts"), "/etc/hosts")
    _run("mount", "--rbind", str(folder / "tmp"), "/tmp")
    _run("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")
    _run("mount", "-t", "proc", "proc", "/proc")
    socket.sethostname(name)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.write(pipe, b"ready\n")
    os.close(pipe)
    os.closerange(3, 256)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then buries them
    while True:
        signal.pause()


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BedError(f"{' '.join(words)}: {done.stderr.strip()}")


def _started(pid: int) -> int:
    """Clock ticks from the boot to the start of a process; 0: there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def _wait_gone(host: Host) -> None:
    """Until the kernel has ended all that ran there."""
    try:
        descriptor = os.pidfd_open(host.pid)
    except OSError:
        return
    select.select([descriptor], [], [], 30)
    os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", default=NAME, help="of the bed, where there are several")
    parser.add_argument("--subnet", default=SUBNET, help="first three numbers of the addresses")
    actions = parser.add_subparsers(dest="action", required=True)
    make = actions.add_parser("make", help="make hosts")
    make.add_argument("hosts", nargs="+")
    make.add_argument("--share", action="append", default=[], help="a folder below /tmp that all hosts see")
    enter = actions.add_parser("enter", help="run a command on a host")
    enter.add_argument("host")
    enter.add_argument("command", nargs=argparse.REMAINDER)
    actions.add_parser("unmake", help="end all that runs on the hosts, and the hosts")
    given = parser.parse_args()
    bed = Bed(given.name, given.subnet)
    if given.action == "make":
        bed.make(given.hosts, given.share)
    elif given.action == "enter":
        words = [*bed.enter(given.host), *given.command]
        os.execvp(words[0], words)
    else:
        require_root()
        bed.unmake()


if __name__ == "__main__":
    try:
        main()
    except BedError as error:
        print(f"bed.py: {error}", file=sys.stderr)
        sys.exit(2)
