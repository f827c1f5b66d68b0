"""The processes of a run: its coordinator, its jobs and its fillers, each a marked process of this machine.

Runs in `verl-mux run` and bench/; called by command.py and watch.py; starts and ends processes, asks the coordinator.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from verl_mux import __version__
from verl_mux.coordinator.bus import curve_keys as keys
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.link import ask
from verl_mux.coordinator.bus.members import end_with_parent
from verl_mux.coordinator.journal import make_empty
from verl_mux.errors import Failure, UserError
from verl_mux.launcher.marked_process import MarkedProcess, left_exit_code, read_note
from verl_mux.launcher.run_file import COORDINATOR, FillerSpec, JobSpec, RunFile, fill, interpreter
from verl_mux.platform.choose import cpu_platform_wanted

_START_S, _ANSWER_S = 60.0, 2.0
_RETRY_S = 5.0  # from one start to the next where starting does not help
_COMPOSED_S = 300.0
_PORTS_FROM = 30_000  # above those of jobs' Ray clusters


class RunCoordinator(MarkedProcess):
    """The coordinator of a run: made -> `begin` -> `keep_up` now and then -> `stop`. It listens at the same address and on the
    same journal each time. Where the run names one that runs already (`own` False), nothing is started and nothing ended."""

    def __init__(self, run: RunFile) -> None:
        directory = run.directory / COORDINATOR
        self.own, self._run, self._keys = run.at is None, run, run.keys_folder()
        self._address_path = directory / "address"
        kept = self._address_path.read_text().strip() if self._address_path.exists() else None
        self.address = run.at or kept or run.bind or f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
        files = {"config": "config.yaml", "journal": "journal", "log-dir": "events"}
        options = [word for option, name in files.items() for word in (f"--{option}", str(directory / name))]
        options += ["--keys", str(self._keys)] if self._keys else []
        command = [sys.executable, "-m", "verl_mux", "coordinator", "--bind", self.address, *options]
        super().__init__("the coordinator", directory, "coordinator.log", command)
        self._started_at, self._last_end = 0.0, ""

    def snapshot(self, timeout: float = _ANSWER_S) -> dict[str, Any] | None:
        """What `verl-mux status` shows; None when the coordinator does not answer."""
        answer = self._ask(m.StatusRequest(), timeout)
        return answer.snapshot if isinstance(answer, m.Status) else None

    def report_end(self, job: JobProcess) -> bool:
        """Report that the job's driver ended; its nodes are given on when no process of it is left. False: no answer came."""
        return self._ask(m.JobOver(job=job.name, uid=job.uid), _ANSWER_S) is not None

    def _ask(self, message: m.Message, timeout: float) -> m.AnyMessage | None:
        return ask(self.address, message, timeout, keys.for_address(self.address, self._keys, keys.OPERATOR))

    def begin(self) -> None:
        """Find the one that an earlier launcher started, or start one.

        Raises:
            UserError, Failure: it does not start; the line says why.
        """
        if not self.own:
            return
        if not (self.take_up() and self.returncode is None):
            if not self._address_path.exists():  # the first of this run, in a folder that was empty
                make_empty(self.directory / "journal", self._run.coordinator_config())
            if self._keys and not self._keys.exists():
                keys.make(self._keys)
            (self.directory / "config.yaml").write_text(yaml.safe_dump(self._run.coordinator_keys(), sort_keys=False))
            self._address_path.write_text(self.address)
            self._start()
        deadline = time.monotonic() + _START_S
        try:
            while self.snapshot(0.5) is None:
                if self.returncode is not None:
                    kind = UserError if self.returncode == 2 else Failure
                    raise kind(f"the coordinator did not start; it {self.how_it_ended()}")
                if time.monotonic() > deadline:
                    raise Failure(f"the coordinator (pid {self.pid}) does not answer at {self.address} (log: {self.log_path})")
        except (UserError, Failure):
            self.stop()
            raise

    def keep_up(self) -> None:
        """Start it again if it died. The reason is printed once."""
        if not self.own or self.returncode is None or time.monotonic() - self._started_at < _RETRY_S:
            return
        if (how := self.how_it_ended()) != self._last_end:
            self._last_end = how
            print(f"the coordinator {how}; it is started again, jobs wait for it", file=sys.stderr, flush=True)
        self._start()

    def stop(self, patience: float = 10.0) -> None:
        """End it with one SIGTERM: it has to close its journal and its event log."""
        self.ask_to_end(signal.SIGTERM, patience)
        self.sweep()

    def _start(self) -> None:
        self._started_at = time.monotonic()
        self.start()


def free_port(host: str) -> int:
    """A free port below the range from which Linux takes ports for outgoing connections: one of those could have taken the port
    when the coordinator comes back to it."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        first = 32_768
    ports = list(range(min(_PORTS_FROM, first - 1_000), first))
    random.shuffle(ports)
    for port in ports:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((host, port))
            return port
    raise Failure(f"no free port of {host} below {first} for the coordinator")


def filler_process(name: str, spec: FillerSpec, run: RunFile, address: str) -> MarkedProcess:
    """`verl-mux hold` with the command that the run file names. Its end is no job's end: the run goes on."""
    where = ["--coordinator", address, "--name", name, "--pool", spec.pool, "--nodes", str(spec.nodes)]
    where += ["--grace", str(spec.grace)]
    command = [*_keeping_exit_code(run.directory / name), "verl_mux", "hold", *where, "--", *fill(spec.command, run, name)]
    return MarkedProcess(name, run.directory / name, "filler.log", command, {**run.environment, **spec.environment})


# How long a process that has left its exit code has to be gone.
_ENDING_S = 10.0


def finish_filler(filler: MarkedProcess) -> str | None:
    """End a filler, if it has not ended by itself. Returns in words what went wrong with it."""
    if filler.returncode is None and (filler.directory / "exit_code").exists():
        filler._wait(_ENDING_S)  # its command has ended; a signal now would make it look as if we had ended it
    if filler.returncode is None:
        filler.stop()
    elif filler.returncode != 0:
        went_wrong = f"filler {filler.name} {filler.how_it_ended()} (log: {filler.log_path})"
        filler.sweep()
        return went_wrong
    return None


# In the job's folder, see `mux.move_note`.
MOVE_NOTE = "left_to_move"
# Words of a job's command that differ from one start to the next without changing the job.
_COORDINATOR, _RESUMING = "mux.coordinator=", "trainer.resume_mode=auto"
_WARM = "mux.launch.warm="


_ASKED = "from importlib.util import find_spec; import verl_mux; print(find_spec('verl') and verl_mux.__version__)"


def require_verl(run: RunFile | None = None) -> None:
    """Before anything is written or prepared for jobs. Raises ModuleNotFoundError: verl is not installed here; UserError: a job's
    own Python has no verl, or another verl_mux."""
    jobs = {interpreter(spec, run): name for name, spec in run.jobs.items()} if run else {sys.executable: ""}
    for python, job in jobs.items():
        if python == sys.executable:
            if importlib.util.find_spec("verl") is None:
                raise ModuleNotFoundError("jobs need verl", name="verl")
        elif subprocess.run([python, "-c", _ASKED], capture_output=True, text=True, cwd="/").stdout.strip() != __version__:
            raise UserError(f"job {job!r}: {python} has not both, verl and verl_mux {__version__}; install them there")


class JobProcess(MarkedProcess):
    """A job of a run: verl's driver on this machine. Without a coordinator (`address` None) no later launcher can take it up
    again: it then ends with its launcher."""

    def __init__(self, name: str, spec: JobSpec, run: RunFile, address: str | None) -> None:
        self.spec = spec
        directory = run.directory / name
        command = [*_keeping_exit_code(directory, interpreter(spec, run)), *_words(name, spec, run, address), *_ray(run, spec)]
        self._submitted = run.submit is not None
        forks = _forks(command, {**os.environ, **run.environment, **spec.environment}, run.submit)
        before = ["verl_mux.warm.fork_server"] if forks else []
        if run.submit is not None:
            command = [*command[:4], "verl_mux.warm.submitted", run.submit, *before, *command[4:]]
        else:
            command = [*command[:2], *before, *command[2:]]
        super().__init__(name, directory, "job.log", command, {**run.environment, **spec.environment})
        self._before_exec = end_with_parent if address is None else None
        self._move_note = directory / MOVE_NOTE

    def environment(self) -> dict[str, str]:
        """The workers of a submitted job get these variables by Ray's own way."""
        own = super().environment()
        if not self._submitted:
            return own
        own["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"  # where verl sets one of them too
        return {**own, "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"env_vars": own}})}

    def start_again(self) -> None:
        """Start it from its newest checkpoint, or its beginning where it has none. Raises OSError."""
        if self._command[-1] != _RESUMING:
            self._command = [*self._command, _RESUMING]
        if self.left_to_move:
            self.moves += 1
        else:
            self.restarts += 1
        self.start()

    @property
    def left_to_move(self) -> bool:
        """It ended well, to be started again on other nodes; it removes its note when it has come so far."""
        return self.returncode == 0 and self._move_note.exists()

    def is_done(self) -> bool:
        """Whether an earlier start of exactly this command ended well, for good or to move."""
        note = read_note(self.directory)
        same = note is not None and _essence(note.command) == _essence(self._command)
        return same and left_exit_code(self.directory) == 0


def composition(name: str, spec: JobSpec, run: RunFile) -> list[str]:
    """The command that prints the job's composed config and starts nothing."""
    return [interpreter(spec, run), "-m", *_words(name, spec, run, None), "--cfg", "job"]


def composed(command: list[str], whose: str, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What such a command prints. Raises UserError: it cannot be composed; Failure: that takes too long."""
    environment = {**environment, "HYDRA_FULL_ERROR": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_COMPOSED_S, check=False)
    except subprocess.TimeoutExpired:
        raise Failure(f"{whose} was not composed within {_COMPOSED_S:g} s") from None
    if done.returncode:
        reasons = re.findall(r"^[\w.]*(?:Error|Exception): (.+)$", done.stderr, re.MULTILINE)
        raise UserError(f"{whose} cannot be composed: {[*(done.stderr.strip() or 'no word').splitlines(), *reasons][-1]}")
    return OmegaConf.to_container(OmegaConf.create(done.stdout))


def _forks(command: list[str], environment: Mapping[str, str], cluster: str | None) -> bool:
    """Whether the job's processes are forks: mux.launch.warm is true, or it is null and there is no GPU. `cluster`: the one that
    the job is submitted to, which is taken to have some, unless VERL_PLATFORM says cpu."""
    given = [word.removeprefix(_WARM) for word in command if word.startswith(_WARM)]
    asked = given[-1].lower() if given else "null"
    joins = [f"ray_init.address={cluster}"] if cluster else []
    return asked == "true" or (asked == "null" and cpu_platform_wanted([*command, *joins], environment))


def _keeping_exit_code(directory: Path, python: str = sys.executable) -> list[str]:
    return [python, "-m", "verl_mux.launcher.keep_exit_code", str(directory / "exit_code")]


def _words(name: str, spec: JobSpec, run: RunFile, address: str | None) -> list[str]:
    directory, folder = run.directory / name, run.keys_folder()
    if spec.nodes == "auto":
        nodes = ["mux.nodes=auto", *([f"mux.slo={spec.slo}"] if spec.slo is not None else [])]
    else:
        nodes = [f"mux.nodes.{side}=[{','.join(map(_quoted, names))}]" for side, names in spec.nodes.items()]
    ours = [
        f"mux.job={_quoted(name)}",
        f"{_COORDINATOR}{_quoted(address) if address else 'null'}",
        *nodes,
        *([f"mux.move_note={_quoted(directory / MOVE_NOTE)}"] if address else []),
        *([f"mux.keys={_quoted(folder.absolute())}"] if folder else []),
        f"mux.seed={spec.seed}",
        f"mux.profile.dir={_quoted(directory / 'events')}",
        f"trainer.default_local_dir={_quoted(directory / 'checkpoints')}",
        f"trainer.experiment_name={_quoted(name)}",
        f"hydra.run.dir={_quoted(directory / 'hydra')}",
    ]
    overrides = fill([*run.overrides, *spec.overrides], run, name, spec.seed)
    resuming = [_RESUMING] if run.resume else []  # Hydra takes the last of several
    return ["verl.trainer.main_ppo", "--config-name", run.config_name, *ours, *overrides, *resuming]


def _ray(run: RunFile, spec: JobSpec) -> list[str]:
    """A Ray of its own. A submitted job finds its cluster by itself, and that has the sizes that its `ray start` has said."""
    if run.submit is not None:
        return [f"++ray_kwargs.ray_init.{key}=null" for key in ("address", "num_cpus", "num_gpus", "object_store_memory")]
    named = any("ray_init.address=" in word for word in (*run.overrides, *spec.overrides))
    return [] if named else ["++ray_kwargs.ray_init.address=local"]


def _essence(command: list[str]) -> list[str]:
    return [word for word in command if not word.startswith(_COORDINATOR) and word != _RESUMING]


def _quoted(value: str | Path) -> str:
    """As a string of Hydra's override grammar: without quotes `1e5` is a number and a comma begins a sweep."""
    return "'" + str(value).replace("'", "\\'") + "'"
