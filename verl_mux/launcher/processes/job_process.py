"""One verl job: its command line, as a process tree that outlives its launcher."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import signal
import sys
from pathlib import Path

import msgspec
import psutil

from verl_mux.coordinator.bus.curve_keys import JOB
from verl_mux.launcher.host_parts import OnHosts, uid_on_hosts
from verl_mux.launcher.processes.marked_process import MarkedProcess, left_exit_code, processes_with, read_note
from verl_mux.launcher.run_file import JobSpec, RunFile, fill, parts_of

_PR_SET_PDEATHSIG = 1
# In the job's folder, see `mux.move_note`.
MOVE_NOTE = "left_to_move"
# Words of a job's command that differ from one start to the next without changing the job.
_OWN_RAY = "++ray_kwargs.ray_init.address=local"
_COORDINATOR, _RESUMING = "mux.coordinator=", "trainer.resume_mode=auto"


def require_verl() -> None:
    """Said before anything is written or prepared for a job. Raises ModuleNotFoundError."""
    if importlib.util.find_spec("verl") is None:
        raise ModuleNotFoundError("jobs need verl", name="verl")


class JobProcess(MarkedProcess):
    """A job of a run. Without a coordinator (`address` None) no later launcher can take it up again: it then ends with its
    launcher."""

    def __init__(self, name: str, spec: JobSpec, run: RunFile, address: str | None) -> None:
        self.spec = spec
        directory = run.directory / name
        command = _command(name, spec, run, address, directory)
        self._on_hosts = bool(run.hosts)
        super().__init__(name, directory, "job.log", command, {**run.environment, **spec.environment})
        self._before_exec = _die_with_parent if address is None else None
        self._move_note = directory / MOVE_NOTE

    @property
    def job_uid(self) -> str:
        """The mark of the job's processes, by which the coordinator knows it."""
        return uid_on_hosts(self.uid) if self._on_hosts else self.uid

    def seen_processes(self) -> list[psutil.Process]:
        """All of the job that this machine sees: on its hosts too, where those are part of it."""
        return [*self.processes(), *(processes_with(self.job_uid) if self._on_hosts else [])]

    def start_again(self) -> None:
        """From its newest checkpoint, or its beginning where it has none. Raises OSError."""
        if self._command[-1] != _RESUMING:
            self._command = [*self._command, _RESUMING]
        if self.left_to_move:
            self.moves += 1
        else:
            self.restarts += 1
        self.start()

    @property
    def left_to_move(self) -> bool:
        """It ended well, to be started again on other nodes; it takes its note away when it has come so far."""
        return self.returncode == 0 and self._move_note.exists()

    def is_done(self) -> bool:
        """Whether an earlier start of exactly this command ended well, for good or to move."""
        note = read_note(self.directory)
        same = note is not None and _essence(note.command) == _essence(self._command)
        return same and left_exit_code(self.directory) == 0


def _die_with_parent() -> None:
    """Linux ends the job's driver when the process that started it dies, however it dies; Ray's processes then follow."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def composition(name: str, spec: JobSpec, run: RunFile) -> list[str]:
    """The command that prints the job's composed config and starts nothing."""
    words = _job(name, spec, run, None, run.directory / name)
    return [sys.executable, "-m", *words, "--cfg", "job"]


def _job(name: str, spec: JobSpec, run: RunFile, address: str | None, directory: Path) -> list[str]:
    ours = [
        f"mux.job={_quoted(name)}",
        f"{_COORDINATOR}{_quoted(address) if address else 'null'}",
        *_nodes(spec),
        *([f"mux.move_note={_quoted(directory / MOVE_NOTE)}"] if address else []),
        f"mux.seed={spec.seed}",
        f"mux.profile.dir={_quoted(directory / 'events')}",
        f"trainer.default_local_dir={_quoted(directory / 'checkpoints')}",
        f"trainer.experiment_name={_quoted(name)}",
        f"hydra.run.dir={_quoted(directory / 'hydra')}",
    ]
    overrides = fill([*run.overrides, *spec.overrides], run, name, spec.seed)
    resuming = [_RESUMING] if run.resume else []  # Hydra takes the last of several
    return ["verl.trainer.main_ppo", "--config-name", run.config_name, *ours, *overrides, *resuming]


def _command(name: str, spec: JobSpec, run: RunFile, address: str | None, directory: Path) -> list[str]:
    job = _job(name, spec, run, address, directory)
    overrides = fill([*run.overrides, *spec.overrides], run, name, spec.seed)
    door = [sys.executable, "-m", "verl_mux.launcher.processes.keep_exit_code", str(directory / "exit_code")]
    if run.keys and not run.hosts:
        job.append(f"mux.keys={_quoted(Path(run.keys).absolute())}")
    if not run.hosts:  # a Ray of its own; without this, any other that runs on this machine
        return [*door, *job, *([] if any("ray_init.address=" in word for word in overrides) else [_OWN_RAY])]
    spec_of_cluster = _cluster(spec, run, directory)
    return [*door, "verl_mux.launcher.on_hosts", msgspec.json.encode(spec_of_cluster).decode(), *job]


def _cluster(spec: JobSpec, run: RunFile, directory: Path) -> OnHosts:
    keys = run.keys_folder()
    return OnHosts(
        parts=parts_of(spec, run),
        folder=str(directory),
        towards=run.towards,
        keys=str(keys) if keys else None,
        forward=list({**run.environment, **spec.environment}),
        role=JOB,
        ray=run.ray,
    )


def _essence(command: list[str]) -> list[str]:
    return [word for word in command if not word.startswith(_COORDINATOR) and word != _RESUMING]


def _nodes(spec: JobSpec) -> list[str]:
    if spec.nodes == "auto":
        return ["mux.nodes=auto", *([f"mux.slo={spec.slo}"] if spec.slo is not None else [])]
    return [f"mux.nodes.{side}=[{','.join(map(_quoted, names))}]" for side, names in spec.nodes.items()]


def _quoted(value: str | Path) -> str:
    """As a string of Hydra's override grammar: without quotes `1e5` is a number and a comma begins a sweep."""
    return "'" + str(value).replace("'", "\\'") + "'"
