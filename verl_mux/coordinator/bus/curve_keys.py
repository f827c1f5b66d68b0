"""Keys of the control bus: CURVE key pairs in ZeroMQ's certificate files, one for the coordinator and one for each role.

Runs in the coordinator and in all its clients; reads and makes key files.

A folder of keys holds `server.key`, `job.key`, `viewer.key`, `operator.key` and `agent.key`, and beside each its `.key_secret`.
The coordinator reads `server.key_secret` and the public keys of the roles; a client needs `server.key` and one
`ROLE.key_secret`. On one machine no folder need be named: a coordinator on loopback makes one for its user, and clients of the
same user look there.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import zmq.auth

from verl_mux.errors import UserError

KEYS_VARIABLE = "VERL_MUX_KEYS"
JOB, VIEWER, OPERATOR, AGENT = ROLES = ("job", "viewer", "operator", "agent")
_SERVER = "server"


@dataclass(frozen=True)
class ServerKeys:
    """`roles`: what the holder of a public key may do, by that key."""

    public: bytes
    secret: bytes
    roles: dict[bytes, str]


@dataclass(frozen=True)
class ClientKeys:
    """`source`: the file of the secret key."""

    public: bytes
    secret: bytes
    server: bytes
    source: Path

    def apply(self, socket: zmq.Socket) -> None:
        socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = self.public, self.secret, self.server


def state_folder() -> Path | None:
    """Where a user's coordinators and jobs keep keys and journals, by the XDG base directories, whether it exists or not; None:
    this user has no home folder."""
    base = os.environ.get("XDG_STATE_HOME", "")
    try:
        return (Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "state") / "verl_mux"
    except RuntimeError:
        return None


def check_port(address: str) -> None:
    """Raises UserError for a port beyond 65535: ZeroMQ would take another one, by its lower bits."""
    match = re.fullmatch(r"tcp://.*:([+-]?\d+)", address)  # none: no tcp, or no address at all, which ZeroMQ says
    if match is not None and not (re.fullmatch("[0-9]{1,5}", match[1]) and int(match[1]) < 2**16):
        raise UserError(f"{address} names port {match[1]}; a port is a number from 0 (any free one, to listen at) to 65535")


def make(directory: Path) -> None:
    """All key pairs, in a folder for this user alone. Raises UserError where something is already."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        # Made beside it and moved there whole: a process that finds the folder finds all keys in it.
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".keys-") as made:
            whole = Path(made) / "keys"
            whole.mkdir(mode=0o700)
            for name in (_SERVER, *ROLES):
                for file in zmq.auth.create_certificates(whole, name):
                    os.chmod(file, 0o600)
            os.rename(whole, directory)
    except OSError as error:
        taken = directory.exists() and "it is there already, and keys are never replaced; name a new folder"
        raise UserError(f"cannot make keys in {directory}: {taken or error.strerror}") from None


def for_bind(bind: str, directory: Path | None) -> ServerKeys:
    """Of a coordinator that listens at `bind`. Raises UserError where other machines reach it and no keys are named, and for a
    port beyond 65535."""
    if "://" not in bind:
        raise UserError(f"--bind {bind} has no transport: tcp://{bind} is meant, or an address of the form tcp://HOST:PORT")
    check_port(bind)
    if directory is not None:
        return _of_server(directory)
    if not is_local(bind):
        raise UserError(
            f"{bind} can be reached from other machines, which takes keys: run `verl-mux keys DIR` and start it with --keys DIR"
        )
    return _of_server(own_directory())


def for_address(address: str, directory: Path | str | None, role: str) -> ClientKeys | None:
    """Of a client in that role; None: this address takes keys, and none are named."""
    if directory := directory or os.environ.get(KEYS_VARIABLE):
        return _of_client(Path(directory), role)
    return _of_client(own_directory(), role) if is_local(address) else None


def own_directory() -> Path:
    """The user's own keys, made by the first process that needs them: a job may start before its coordinator."""
    if (state := state_folder()) is None:
        raise UserError("this user has no home folder to keep keys in: run `verl-mux keys DIR` and name it by --keys DIR")
    if not (own := state / "keys").exists():
        with contextlib.suppress(UserError):  # another process may make them in this moment
            make(own)
    return own


def is_local(address: str) -> bool:
    """Whether only this machine reaches it."""
    if not address.startswith("tcp://"):
        return address.startswith(("ipc://", "inproc://"))
    with contextlib.suppress(ValueError):
        host = urlsplit(address).hostname or ""
        return host in ("localhost", "lo") or ipaddress.ip_address(host).is_loopback
    return False


def _of_server(directory: Path) -> ServerKeys:
    public, secret = _read_secret(directory / f"{_SERVER}.key_secret")
    return ServerKeys(public, secret, {_read(directory / f"{role}.key")[0]: role for role in ROLES})


def _of_client(directory: Path, role: str) -> ClientKeys:
    """With the key of the role, or else of a role that the folder has; the coordinator knows what that may do."""
    files = [directory / f"{name}.key_secret" for name in dict.fromkeys((role, *ROLES))]
    source = next((file for file in files if file.exists()), files[0])
    return ClientKeys(*_read_secret(source), _read(directory / f"{_SERVER}.key")[0], source)


def _read_secret(file: Path) -> tuple[bytes, bytes]:
    """Raises UserError, also where others may read it."""
    public, secret = _read(file)
    if secret is None:
        raise UserError(f"{file} holds no secret key")
    if (mode := stat.S_IMODE(file.stat().st_mode)) & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(f"{file} may be read by others (mode {mode:o}); `chmod 600` it, or make new keys")
    return public, secret


def _read(file: Path) -> tuple[bytes, bytes | None]:
    try:
        keys = zmq.auth.load_certificate(file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or ("no such file" if not file.exists() else "not a key file")
        raise UserError(f"cannot read the key {file}: {reason}; `verl-mux keys DIR` makes a folder of keys") from None
    if any(key is not None and len(key) != 40 for key in keys):
        raise UserError(f"{file} holds a damaged key")
    return keys
