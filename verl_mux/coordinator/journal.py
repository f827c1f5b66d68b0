"""The coordinator's memory on disk: SQLite in WAL mode, every event that changes anything, in order.

An event is written before its instructions are carried out, so no client can know of a lease that a restarted
coordinator does not. What was committed survives the end of the process at any point; after a power failure the last
events may be missing, but then so are the jobs of that machine. Replaying the events gives the state back, because
the state machine is pure; every COMPACT_EVERY events they are replaced by a snapshot.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec

from verl_mux.coordinator.config import Config
from verl_mux.coordinator.events import Event
from verl_mux.coordinator.records import JobState, State
from verl_mux.coordinator.state import Machine
from verl_mux.errors import UserError

COMPACT_EVERY = 20_000

_encode = msgspec.msgpack.Encoder().encode
_event = msgspec.msgpack.Decoder(Event)
_state = msgspec.msgpack.Decoder(State)


class Journal:
    """opened -> `restore` -> `append`... -> `close`. One process at a time; path None keeps nothing."""

    def __init__(self, path: str | Path | None):
        self._path = path
        try:
            Path(path or ".").parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False, timeout=1.0)
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")  # two coordinators with one memory would both grant
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("CREATE TABLE IF NOT EXISTS events (n INTEGER PRIMARY KEY, body BLOB NOT NULL)")
            self._db.execute("CREATE TABLE IF NOT EXISTS snapshot (id INTEGER PRIMARY KEY, config BLOB, state BLOB)")
        except (sqlite3.Error, OSError) as error:
            raise UserError(f"journal {path} cannot be used: {error}") from error
        self._count = 0

    def restore(self, config: Config, epoch: str) -> Machine:
        """The machine as it was. With another configuration only the token counter is kept, and only if no job is left.

        Raises UserError when the journal holds unfinished jobs of another configuration.
        """
        row = self._db.execute("SELECT config, state FROM snapshot").fetchone()
        if row is None:
            machine = Machine(config, epoch)
            self._compact(machine)
            return machine
        before = msgspec.msgpack.decode(row[0], type=Config)
        machine = Machine(before, epoch, _state.decode(row[1]))
        for (body,) in self._db.execute("SELECT body FROM events ORDER BY n"):
            machine.handle(_event.decode(body))
        if before != config:
            machine = self._carry_token_over(machine, config)
        self._compact(machine)
        return machine

    def _carry_token_over(self, machine: Machine, config: Config) -> Machine:
        left = [job.name for job in machine.state.jobs.values() if job.state is not JobState.ENDED]
        if left:
            raise UserError(
                f"journal {self._path} was written with another configuration and holds unfinished jobs"
                f" ({', '.join(left)}): start with the old configuration, or name another journal"
            )
        return Machine(config, machine.epoch, State(token=machine.state.token))

    def append(self, event: Event, machine: Machine) -> None:
        """`machine` has handled the event already."""
        self._db.execute("INSERT INTO events (body) VALUES (?)", (_encode(event),))
        self._count += 1
        if self._count >= COMPACT_EVERY:
            self._compact(machine)

    def _compact(self, machine: Machine) -> None:
        with self._db:
            self._db.execute("BEGIN")
            row = (_encode(machine.config), _encode(machine.state))
            self._db.execute("INSERT OR REPLACE INTO snapshot (id, config, state) VALUES (1, ?, ?)", row)
            self._db.execute("DELETE FROM events")
        self._count = 0

    def close(self) -> None:
        self._db.close()
