"""`verl-mux hold --pool train -- CMD...`: CMD on nodes that no job uses or waits for; it leaves when one wants them."""

from __future__ import annotations

import os
import signal
import socket
import sys
import uuid
from typing import Annotated

import msgspec
import typer

from verl_mux.coordinator.bus.client import Lease, LocalMux
from verl_mux.coordinator.bus.connect import connect
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.coordinator.bus.messages import SIDES
from verl_mux.coordinator.commands import DEFAULT_ADDRESS, Address, Keys, check_timeout
from verl_mux.errors import UserError
from verl_mux.filler import place
from verl_mux.filler.held_process import HeldProcess

# Of the time that the coordinator gives a filler, for seeing that nothing is left, and for the way there and back.
_MARGIN_S = 0.2
_LOOK_S = 0.05
# As sysexits.h has it: try again later.
ASKED_TO_LEAVE = 75


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds. `again`: the command is started anew after it had to leave."""

    command: list[str]
    pool: str
    num_nodes: int
    grace: float
    number: signal.Signals
    least: float
    again: bool
    anywhere: bool
    niceness: int


def hold(
    command: Annotated[list[str], typer.Argument(metavar="CMD", help="What to run; it must be able to resume.")],
    pool: Annotated[str, typer.Option(help="A pool or a node of the coordinator.")],
    nodes: Annotated[int, typer.Option(help="How many nodes of it.")] = 1,
    name: Annotated[str | None, typer.Option(help="What it is called in the status; default: hold-HOST-PID.")] = None,
    coordinator: Address = DEFAULT_ADDRESS,
    keys: Keys = None,
    grace: Annotated[float, typer.Option(help="Seconds from the signal to SIGKILL.")] = 0.5,
    signal_name: Annotated[str, typer.Option("--signal", help="What asks CMD to leave.")] = "TERM",
    least: Annotated[float, typer.Option(help="Start only where no job is expected for so many seconds.")] = 0.0,
    again: Annotated[bool, typer.Option("--again/--once", help="Start CMD anew after it had to leave, or end then.")] = True,
    niceness: Annotated[int, typer.Option("--nice", help="CPU priority of CMD below the jobs' processes, 0 to 19.")] = 10,
    anywhere: Annotated[bool, typer.Option("--anywhere", help="Also nodes of other hosts, to which CMD goes by itself.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the coordinator.")] = 30.0,
) -> None:
    """Run a command on nodes of a pool while no job uses or wants them. Its exit code is passed on."""
    if grace < 0 or least < 0:
        raise UserError(f"--grace is {grace:g} and --least {least:g}; 0 s or more is needed")
    if not 0 <= niceness <= 19:
        raise UserError(f"--nice is {niceness}; 0 to 19 are allowed")
    check_timeout(timeout)
    options = Options(
        command=command,
        pool=pool,
        num_nodes=nodes,
        grace=grace,
        number=_signal(signal_name),
        least=least,
        again=again,
        anywhere=anywhere,
        niceness=niceness,
    )
    name = name or f"hold-{socket.gethostname()}-{os.getpid()}"
    uid = _carried_uid(name)
    # The side is only what the nodes are shown to be used for.
    side = pool if pool in SIDES else SIDES[-1]
    key_folder = None if keys is None else str(keys)
    mux = connect(coordinator, name, {side: [pool]}, uid=uid, keys=key_folder, timeout=timeout, filler=True)
    try:
        _check_grace(mux, grace)
        code = _Holder(mux, uid, side, options).run()
    finally:
        mux.close()
    raise typer.Exit(code)


def _signal(name: str) -> signal.Signals:
    try:
        return signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"]
    except KeyError:
        raise UserError(f"--signal is {name!r}; allowed: TERM, INT, USR1 or another name of a signal") from None


def _carried_uid(name: str) -> str:
    """The mark of this start, which this process itself carries in its first environment: if it hangs, it can be ended as its
    command can. So without one it starts once more, in the same process."""
    uid = os.environ.get(UID_VARIABLE, "")
    if uid and (":" not in uid or uid.rpartition(":")[0] == name):
        return uid
    marked = {**os.environ, UID_VARIABLE: f"{name}:{uuid.uuid4().hex}"}
    os.execve(sys.executable, [sys.executable, "-m", "verl_mux", *sys.argv[1:]], marked)


def _check_grace(mux: LocalMux, grace: float) -> None:
    if mux.filler_grace is None:
        raise UserError(f"the coordinator at {mux.address} knows no fillers: install the same verl-mux on both sides")
    if grace + _MARGIN_S > mux.filler_grace:
        raise UserError(
            f"--grace is {grace:g} s; the coordinator ends what has not left after {mux.filler_grace:g} s (filler_grace in its"
            f" file), so at most {max(mux.filler_grace - _MARGIN_S, 0):g} is allowed"
        )


class _Interrupted(Exception):
    pass


class _Holder:
    """Waits for a lease, runs the command under it, leaves, and waits again."""

    def __init__(self, mux: LocalMux, uid: str, side: str, options: Options) -> None:
        self._mux, self._uid, self._side, self._options = mux, uid, side, options
        self._nodes = place.reachable(mux, options.pool, options.num_nodes, options.anywhere)
        self._stopped_by: int | None = None
        self._waits = False

    def run(self) -> int:
        """The exit code for this process. Raises LeaseLost when the coordinator has ended this filler."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        while True:
            try:
                lease = self._wait()
            except _Interrupted:
                return self._code_of_stop()
            code = self._hold(lease)
            if self._stopped_by is not None:
                return self._code_of_stop()
            if code is not None:
                return code
            if not self._options.again:
                return ASKED_TO_LEAVE

    def _stop(self, number: int, _: object) -> None:
        """Nothing is cut off halfway but a wait."""
        self._stopped_by = number
        if self._waits:
            self._waits = False
            raise _Interrupted

    def _code_of_stop(self) -> int:
        return 128 + (self._stopped_by or 0)

    def _wait(self) -> Lease:
        options = self._options
        self._waits = True
        try:
            if self._stopped_by is not None:
                raise _Interrupted
            return self._mux.acquire(self._side, nodes=self._nodes, num_nodes=options.num_nodes, least=options.least)
        finally:
            self._waits = False

    def _hold(self, lease: Lease) -> int | None:
        """The command's exit code; None if it had to leave before it ended."""
        options, mux = self._options, self._mux
        found, cpus = place.environment(mux, lease), place.cpus(mux, lease)
        process = HeldProcess(options.command, found, self._uid, cpus, options.niceness)
        _say(f"holds {', '.join(lease.nodes)}")
        code = None
        try:
            if not lease.wanted.is_set():
                process.start()
                while (code := process.code()) is None and self._stopped_by is None and not lease.wanted.wait(_LOOK_S):
                    pass
        finally:
            process.end(options.number, options.grace)
            mux.release(lease)
        why = f"exit code {code}" if code is not None else "interrupted" if self._stopped_by is not None else "a job wants it"
        _say(f"gave {', '.join(lease.nodes)} back: {why}")
        return code


def _say(text: str) -> None:
    print(f"verl-mux hold: {text}", file=sys.stderr, flush=True)
