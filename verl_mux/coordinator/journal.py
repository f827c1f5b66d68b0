"""The coordinator's memory on disk: every input that changes anything, in order.

Runs in the coordinator's process; server.py makes a Journal and a Delivery. Touches the files of journal_files.py.

Inputs that came together are one frame of an append-only file, on disk before any client sees what follows from them; so no
client can know of a lease that a restarted coordinator does not, whether a process or the machine ended. Replaying the inputs
gives the state back, because the state machine is pure. Every COMPACT_EVERY inputs or COMPACT_BYTES, and at each start, a new
file with a snapshot takes the place of the old one. Where something may have been lost, either the start is refused, or the
coordinator settles (core/registration.py): it asks living jobs for their leases before it grants any.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.members import boot_id, seconds_since_boot
from verl_mux.coordinator.core import hosts
from verl_mux.coordinator.core.leases import LAST_EPOCH, epoch_of, last_possible, token_at, tokens_before
from verl_mux.coordinator.core.records import Input, Instruction, JobState, Send, State
from verl_mux.coordinator.core.settings import Config
from verl_mux.coordinator.core.state import Machine
from verl_mux.coordinator.journal_files import Damaged, Epoch, FrameFile, Lock, parse, read_epoch, write_epoch
from verl_mux.errors import UserError

log = logging.getLogger(__name__)

COMPACT_EVERY = 20_000
COMPACT_BYTES = 2**25  # or as many as the snapshot has, if that is more
_RETRY_S = 0.5
_ADVICE = (
    "Put the right file back, or move this one away: the coordinator then asks living jobs for their leases before it grants any"
)
# At most this many inputs are written together, even when more come without a pause.
MOST_TOGETHER = 256
# Only shown to people: these may wait for the next write, and the last ones be lost.
_FOR_PEOPLE = (m.Progress, m.PhaseNote, m.MemoryReport)


class Clock(msgspec.Struct, frozen=True):
    """`offset` to the time since the boot named `boot`, so that what a journal says of an earlier boot stays comparable."""

    boot: str
    offset: float = 0.0

    def now(self) -> float:
        return seconds_since_boot() + self.offset

    def wall(self, then: float) -> float:
        """Epoch seconds of a moment of this clock: for people to read, never to reckon with."""
        return time.time() - (self.now() - then)

    def going_on(self, last: float) -> Clock:
        """For a coordinator that starts now, where one of this clock came as far as `last`. After a reboot it goes on from there:
        how long the machine was off, only the wall clock could say."""
        same_boot = self.boot == boot_id() and self.now() >= last
        return self if same_boot else Clock(boot_id(), last - seconds_since_boot())


class _Snapshot(msgspec.Struct, kw_only=True):
    """The first frame. `journal`: the same as long as the journal lives; `epoch`: of the coordinator that wrote it."""

    journal: str
    epoch: int
    clock: Clock
    now: float
    config: Config
    state: State


_encode = msgspec.msgpack.Encoder().encode
_inputs = msgspec.msgpack.Decoder(list[Input])
_snapshot = msgspec.msgpack.Decoder(_Snapshot)


class Journal:
    """made (locked) -> `restore` -> (`append`..., `commit`)... -> `close`. path None keeps nothing."""

    def __init__(self, path: str | Path | None):
        self.path = Path(path) if path is not None else None
        self.clock = Clock(boot_id())
        self.lost: str | None = None  # what the predecessor's memory may lack, in words
        self.blocked: str | None = None  # why nothing can be written now
        self._lock: Lock | None = None
        self._file: FrameFile | None = None
        self._epoch = Epoch("", 0)
        self._pending: list[Input] = []
        self._count = self._bytes = self._first = 0  # inputs and their bytes since the snapshot, and the snapshot's
        self._retry_at = 0.0
        if self.path is not None:
            with self._in_words(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._lock = Lock(self._beside("lock"), self.path)

    def restore(self, config: Config, name: str, is_first: bool) -> Machine:
        """The machine as it was, settling if anything may be missing. `name`: of this start; `is_first`: no coordinator can have
        been at its address before.

        Raises UserError when the journal is damaged, or holds unfinished jobs of a configuration that does not fit.
        """
        if self.path is None:
            machine = Machine(config, name)
            if not is_first:
                self.lost = "no journal is kept"
                machine.settle(last_possible(time.time()))
                machine.state.token = token_at(time.time())
            return machine
        try:
            with self._in_words(self.path):
                return self._restore(self.path, config, name, is_first)
        except BaseException:
            self.close()
            raise

    def append(self, taken: Input) -> None:
        """To be written at the next `commit`. A machine has handled it already."""
        if self.path is not None and self.blocked is None:
            self._pending.append(taken)

    def commit(self, machine: Machine) -> bool:
        """True when everything appended, all of which `machine` has handled, is on disk. Tried again where it was not."""
        if self._file is None or (not self._pending and self.blocked is None):
            return True
        if self.blocked is not None and time.monotonic() < self._retry_at:
            return False
        try:
            self._write(self._file, machine)
        except OSError as error:  # what could not be written is in the state, so a snapshot will make up for it
            if self.blocked is None:
                log.error("journal %s cannot be written (%s): nothing is granted until it can", self.path, error.strerror)
            self.blocked, self._pending, self._retry_at = str(error.strerror), [], time.monotonic() + _RETRY_S
            return False
        if self.blocked is not None:
            log.warning("journal %s can be written again; grants go on", self.path)
            self.blocked = None
        return True

    def about(self) -> dict[str, str | None]:
        """For `verl-mux status`."""
        return {"path": str(self.path) if self.path else None, "lost": self.lost, "blocked": self.blocked}

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                if self._pending:
                    self._file.append(_encode(self._pending))
            self._file.close()
        if self._lock is not None:
            self._lock.close()
        self._file, self._lock = None, None

    # --- writing ---

    def _write(self, file: FrameFile, machine: Machine) -> None:
        learnt, settled = epoch_of(machine.state.token), machine.state.settle_until is None
        if learnt > self._epoch.number or (settled and self._epoch.unknown):
            self._raise_epoch(max(learnt, self._epoch.number), 0 if settled else self._epoch.unknown)
        body = _encode(self._pending)
        is_full = self._count + len(self._pending) >= COMPACT_EVERY or self._bytes + len(body) > max(COMPACT_BYTES, self._first)
        if self.blocked is not None or is_full:
            self._compact(machine)
        else:
            file.append(body)
            self._count, self._bytes = self._count + len(self._pending), self._bytes + len(body)
        self._pending = []

    def _compact(self, machine: Machine) -> None:
        assert self.path is not None
        snapshot = _Snapshot(
            journal=self._epoch.journal, epoch=self._epoch.number, clock=self.clock, now=self.clock.now(),
            config=machine.config, state=machine.state,
        )  # fmt: skip
        body = _encode(snapshot)
        made = FrameFile(self.path, body)
        if self._file is not None:
            self._file.close()
        self._file, self._count, self._bytes, self._first = made, 0, 0, len(body)

    def _raise_epoch(self, number: int, unknown: int) -> None:
        raised = Epoch(self._epoch.journal, number, unknown=unknown)
        write_epoch(self._beside("epoch"), raised)
        self._epoch = raised

    # --- reading ---

    def _restore(self, path: Path, config: Config, name: str, is_first: bool) -> Machine:
        snapshot, inputs, epoch = self._find(path, is_first)
        machine = Machine(config, name) if snapshot is None else self._replayed(snapshot, inputs, config, name)
        state = machine.state
        known = [epoch.number] if epoch else []
        known += [snapshot.epoch, epoch_of(state.token)] if snapshot else []
        number = max(known) + 1 if known else 0
        if number > LAST_EPOCH:
            raise Damaged(f"its coordinator has been started {number} times, and tokens count no further")
        state.token = max(state.token, tokens_before(number))
        if self.lost:  # a predecessor that settled may have lost its memory again before it had learnt everything
            machine.settle(last_possible(time.time()) if epoch is None else max(tokens_before(number), epoch.unknown))
        elif state.settle_until is not None:  # the predecessor ended while it settled: all begins anew
            machine.settle(0)
        known_as = snapshot or epoch
        self._epoch = Epoch(known_as.journal if known_as is not None else uuid.uuid4().hex, number)
        self._raise_epoch(number, 0 if state.settle_until is None else state.unknown_up_to)
        self._compact(machine)
        return machine

    def _find(self, path: Path, is_first: bool) -> tuple[_Snapshot | None, list[Input], Epoch | None]:
        """What lies on disk; `lost` says then what may be missing."""
        epoch = None
        try:
            epoch = read_epoch(self._beside("epoch"))
        except Damaged as error:
            self.lost = f"{self._beside('epoch')} is damaged: {error}"
        data = path.read_bytes() if path.exists() else None
        if not data:
            state = "gone" if data is None else "empty"
            if epoch is not None:
                self.lost = f"journal {path} is {state} (there was one in epoch {epoch.number})"
            elif self.lost is None and (data is not None or not is_first):
                self.lost = f"no journal was found at {path}" if data is None else f"journal {path} is empty"
            return None, [], epoch
        contents = parse(data)
        snapshot, inputs = _decoded(contents.frames)
        if epoch is not None and epoch.journal != snapshot.journal:
            raise Damaged(f"it belongs to another coordinator than {self._beside('epoch').name} beside it")
        if contents.lost:
            self.lost = f"journal {path} is cut: {contents.lost}"
        elif epoch is None:
            self.lost = self.lost or f"{self._beside('epoch')} is gone, so journal {path} may be an old one"
        elif epoch.number != snapshot.epoch:
            self.lost = f"journal {path} is an old one (epoch {snapshot.epoch}, but there was {epoch.number})"
        return snapshot, inputs, epoch

    def _replayed(self, snapshot: _Snapshot, inputs: list[Input], config: Config, name: str) -> Machine:
        machine = Machine(snapshot.config, name, snapshot.state)
        for taken in inputs:
            try:
                machine.handle(taken)
            except Exception as error:
                raise Damaged(f"a {type(taken.what).__name__} in it cannot be handled: {error!r}") from error
        self.clock = snapshot.clock.going_on(max([snapshot.now, *(taken.now for taken in inputs)]))
        return _carried_over(machine, config, self.path)

    def _beside(self, what: str) -> Path:
        assert self.path is not None
        return self.path.with_name(f"{self.path.name}.{what}")

    @staticmethod
    @contextlib.contextmanager
    def _in_words(path: Path):
        try:
            yield
        except Damaged as error:
            raise UserError(f"journal {path} cannot be used: {error}. {_ADVICE}") from error
        except OSError as error:
            raise UserError(f"journal {path} cannot be used: {error}") from error


def make_empty(path: Path, config: Config) -> None:
    """For a launcher that knows that no coordinator can have been there before: the first one then grants at once."""
    journal = Journal(path)
    journal.restore(config, "", is_first=True)
    journal.close()


def _decoded(bodies: list[bytes]) -> tuple[_Snapshot, list[Input]]:
    try:
        return _snapshot.decode(bodies[0]), [taken for body in bodies[1:] for taken in _inputs.decode(body)]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"another version of verl-mux wrote it ({error})") from error


def _carried_over(machine: Machine, config: Config, path: Path | None) -> Machine:
    """The machine under another configuration than that of its journal: all of it where that suits the jobs on record, else the
    token and what is known of hosts. Raises UserError where it does not and a job is unfinished."""
    state = machine.state
    refusal = hosts.change_refusal(state, machine.config, config)
    if refusal is not None:
        left = [job.name for job in state.jobs.values() if job.state is not JobState.ENDED]
        if left:
            raise UserError(
                f"journal {path} was written with another configuration and holds unfinished jobs ({', '.join(left)}): {refusal}."
                " Start with the old configuration, or name another journal"
            )
        state = State(token=state.token, hosts=state.hosts)
    state.fenced = hosts.fenced(state, config)
    return Machine(config, machine.epoch, state)


class Delivery:
    """Carries out instructions when the input that they follow from is on disk; inputs that came together share one write.

    `carry_out` does what an instruction says. `soon` calls a function when the loop has taken all that has come. While the
    journal cannot be written, what follows from changes waits; heartbeats are answered.
    """

    def __init__(self, journal: Journal, machine: Machine, carry_out: Callable[[Instruction], None],
                 soon: Callable[[Callable[[], None]], object]):  # fmt: skip
        self._journal, self._machine, self._carry_out, self._soon = journal, machine, carry_out, soon
        self._waiting: list[Instruction] = []
        self._taken = 0

    def take(self, taken: Input, instructions: list[Instruction], keep: bool) -> None:
        """`keep`: the input has changed something."""
        if keep:
            self._journal.append(taken)
        can_wait = isinstance(taken.what, _FOR_PEOPLE) and not any(isinstance(step, Send) for step in instructions)
        if can_wait or (not keep and not self._taken and self._journal.blocked is None):
            return self._do(instructions)
        if self._journal.blocked is not None:
            self._do([step for step in instructions if _is_ack(step)])
            instructions = [step for step in instructions if not _is_ack(step)]
        self._waiting += instructions
        self._taken += 1
        if self._taken == 1:
            self._soon(self.flush)
        elif self._taken % MOST_TOGETHER == 0:
            self.flush()

    def flush(self) -> None:
        """Also writes what could wait, and tries again what could not be written; called at each look of the process watch."""
        self._taken = 0
        if self._journal.blocked is not None:  # clients ask again every second; one answer is enough
            self._waiting = list({_same(step, number): step for number, step in enumerate(self._waiting)}.values())
        if self._journal.commit(self._machine):
            waiting, self._waiting = self._waiting, []
            self._do(waiting)

    def _do(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            self._carry_out(instruction)


def _is_ack(instruction: Instruction) -> bool:
    return isinstance(instruction, Send) and isinstance(instruction.message, m.HeartbeatAck)


def _same(instruction: Instruction, number: int) -> object:
    """Equal for two messages that say the same to the same client."""
    return (instruction.client, m.encode(instruction.message)) if isinstance(instruction, Send) else number
