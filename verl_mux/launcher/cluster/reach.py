"""How a command is started on a host. Pure."""

from __future__ import annotations

import shlex
import sys
from typing import Literal

import msgspec

Way = Literal["ssh", "srun", "kubectl", "local"]
# A host that does not answer for two minutes is lost; a link that comes back before is not noticed.
_SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=8"]


class HostSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A host of a run file.

    `via`: what starts a command there; a list of words is put before the command as it is. `target`: what ssh, srun or kubectl
    call the host, default: its name. `address`: at which the other hosts reach it, default: that by which it reaches the
    coordinator. `python`: the interpreter that has verl and verl_mux, default: the launcher's path.
    """

    via: Way | list[str] = "ssh"
    target: str | None = None
    address: str | None = None
    python: str | None = None


def words(name: str, host: HostSpec, command: list[str]) -> list[str]:
    """The command line that runs `command` on the host `name`, its stdin and stdout connected."""
    target = host.target or name
    if isinstance(host.via, list):
        return [*host.via, *command]
    return {
        "local": command,
        # ssh hands one line to the shell over there.
        "ssh": [*_SSH, "--", target, shlex.join(command)],
        "srun": ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--quiet", f"--nodelist={target}", "--", *command],
        "kubectl": ["kubectl", "exec", "--stdin", target, "--", *command],
    }[host.via]


def python_of(host: HostSpec) -> str:
    return host.python or sys.executable
