"""The YAML file of `verl-mux run`: one coordinator and several verl jobs, which this machine starts.

    base: demo.yaml                      # beside this file: what it says holds here too; lists here come after its lists
    dir: runs/demo                       # everything the run writes
    prepare: [[python, make_data.py]]    # commands run before, side by side
    environment: {NAME: value}           # for all jobs
    coordinator: {pools: ..., schedule: ...}
    config_name: mux_ppo_trainer         # verl's primary config
    overrides: [key=value, ...]          # for all jobs
    bind: tcp://10.0.0.1:5570            # where other hosts reach the coordinator; none: this machine alone
    keys: /secure/mux_keys               # of the coordinator; default with `bind`: `keys` in `dir`, made where it is missing
    resume: true                         # jobs go on from their checkpoints in `dir` instead of starting anew
    jobs:
      NAME: {nodes: {rollout: [r0], train: [t0]}, gpus: {rollout: 1, train: 1}, seed: 1, overrides: [...]}
      OTHER: {slo: 1.5, after: [NAME]} # no nodes: a coordinator with `placement: scheduler` chooses them
      THIRD: {nodes: ..., restarts: 2} # when it fails or is killed it is started again, at most twice, from its last checkpoint
      OTHER_ENGINE: {nodes: ..., python: ../.venv-vllm/bin/python} # of an environment with the same verl_mux and its own engine
      WIDE: {nodes: ..., ray: "10.0.0.1:6379"} # joins this Ray cluster, which has a Ray node on the host of each of its nodes
    fillers:                             # run where no job does, until the jobs have ended; see docs/hold.md
      NAME: {pool: train, command: [python, train.py]}

{dir}, {job}, {seed} and {here}, the folder of the run file, are replaced in commands and overrides. Runs in `verl-mux run`,
`verl-mux plan` and bench/; reads the file only.
"""

from __future__ import annotations

import graphlib
import math
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

import msgspec

from verl_mux.coordinator.bus.messages import SIDES
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.core.settings import Config
from verl_mux.errors import UserError
from verl_mux.yaml_file import read_yaml

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Folders of a run that are no job's. Agents on hosts log to AGENTS.
COORDINATOR, EARLIER, AGENTS, KEYS = "coordinator", "earlier", "agents", "keys"
KEPT = {COORDINATOR: "the coordinator's files", EARLIER: "earlier runs", AGENTS: "the agents' logs", KEYS: "the keys"}


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One verl job. `nodes`: the coordinator's nodes by side, or `auto`; `gpus`: logical or real GPUs it uses on each node
    of a side. `slo`: how many times its iteration alone one may last, for a job that the coordinator places. `after`: jobs
    that must have ended before it is started. `restarts`: how often it is started again, from its newest checkpoint, when it
    ended with an error other than in its keys. `ray`: HOST:PORT of a Ray cluster that the job joins; None: the job starts one
    here. `python`: the interpreter of its processes on this machine."""

    nodes: dict[str, list[str]] | Literal["auto"] = "auto"
    gpus: dict[str, int] = msgspec.field(default_factory=lambda: {"rollout": 1, "train": 1})
    seed: int = 0
    overrides: list[str] = []
    environment: dict[str, str] = {}
    slo: float | None = None
    after: list[str] = []
    restarts: int = 0
    ray: str | None = None
    python: str = "python"


class FillerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command that uses what the jobs leave: the options of `verl-mux hold`. Times in seconds."""

    pool: str
    command: list[str]
    nodes: int = 1
    grace: float = 0.5
    environment: dict[str, str] = {}


class RunFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module's docstring. Times in seconds. `at`: the address of a coordinator that runs already; `coordinator` then
    holds the pools that it answered with. `submit`: URL of the job server of the Ray cluster that all jobs are submitted to."""

    dir: str
    coordinator: dict[str, Any]
    at: str | None = None
    submit: str | None = None
    jobs: dict[str, JobSpec]
    fillers: dict[str, FillerSpec] = {}
    config_name: str = "mux_ppo_trainer"
    prepare: list[list[str]] = []
    environment: dict[str, str] = {}
    overrides: list[str] = []
    bind: str | None = None
    keys: str | None = None
    resume: bool = False
    here: str = ""

    @property
    def directory(self) -> Path:
        return Path(self.dir).absolute()

    def coordinator_config(self) -> Config:
        """The coordinator's part, checked; it waits for all jobs that start with the run before the first step."""
        return make_config(self.coordinator_keys())

    def coordinator_keys(self) -> dict[str, Any]:
        """As they stand in a coordinator's file."""
        return {"expect_jobs": sum(not job.after for job in self.jobs.values()), **self.coordinator}

    def keys_folder(self) -> Path | None:
        """Of a coordinator that other machines reach."""
        return Path(self.keys) if self.keys is not None else self.directory / KEYS if self.bind is not None else None


def read(path: Path, directory: Path | None = None, resume: bool = False, more: dict[str, Any] | None = None) -> RunFile:
    """Read and check a run file. `directory` replaces its `dir`; `resume` sets that key, `more` any others.

    Raises:
        UserError: what was given, and what is allowed.
    """
    given = given_by(path)
    if isinstance(given, dict):
        replaced = {"dir": str(directory)} if directory is not None else {}
        given = {**given, **replaced, "here": str(path.absolute().parent), **({"resume": True} if resume else {}), **(more or {})}
    try:
        run = msgspec.convert(given, RunFile)
        _check(run)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {_explain(given, error)}") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return run


def given_by(path: Path) -> Any:
    """What a run file says, and the file that it names as `base`. Raises UserError."""
    given = read_yaml(path)
    base = given.pop("base", None) if isinstance(given, dict) else None
    return given if base is None else _joined(read_yaml(path.parent / str(base)), given)


def _joined(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {**one, **{key: _joined(one[key], value) if key in one else value for key, value in other.items()}}
    return [*one, *other] if isinstance(one, list) and isinstance(other, list) else other


def _explain(given: Any, error: msgspec.ValidationError) -> str:
    """The error with the name of the job or filler, which msgspec leaves out, and with what is allowed there."""
    for what, key, kind in (("job", "jobs", JobSpec), ("filler", "fillers", FillerSpec)):
        specs = given.get(key) if isinstance(given, dict) else None
        for name, spec in specs.items() if isinstance(specs, dict) else ():
            try:
                msgspec.convert(spec, kind)
            except msgspec.ValidationError as inner:
                return f"{what} {name!r}: {inner}; a {what} has {', '.join(kind.__struct_fields__)}"
    return f"{error}; a run file has {', '.join(it for it in RunFile.__struct_fields__ if it not in ('here', 'at', 'submit'))}"


def _check(run: RunFile) -> None:
    """Raises UserError without the file's name."""
    if not run.jobs:
        raise UserError("`jobs` is empty; at least one is needed")
    if run.bind is not None and re.match(r"tcp://(0\.0\.0\.0|\[::\]|\*)?:", run.bind):
        raise UserError(f"bind is {run.bind}; one address of this machine is needed, at which the hosts reach it")
    config = run.coordinator_config()
    for name, filler in run.fillers.items():
        _check_name(name, "filler")
        _check_filler(f"filler {name!r}", filler, config)
        if name in run.jobs:
            raise UserError(f"{name!r} names both a job and a filler; each needs a name of its own")
    for name, job in run.jobs.items():
        _check_name(name, "job")
        if missing := [other for other in job.after if other not in run.jobs]:
            raise UserError(f"job {name!r}: after has {missing[0]!r}; there are {', '.join(run.jobs)}")
        _check_job(f"job {name!r}", job, config)
        if shutil.which(python := interpreter(job, run)) is None:
            raise UserError(f"job {name!r}: python is {job.python}, and there is no program {python}")
    try:
        graphlib.TopologicalSorter({name: job.after for name, job in run.jobs.items()}).prepare()
    except graphlib.CycleError as error:
        chain = " -> ".join(map(repr, error.args[1]))
        raise UserError(f"job {chain}: waits for its own end; `after` must not lead back to the job") from None


def _check_filler(filler: str, spec: FillerSpec, config: Config) -> None:
    if spec.nodes < 1:
        raise UserError(f"{filler}: nodes is {spec.nodes}; 1 or more is allowed")
    if not 0 <= spec.grace < math.inf:
        raise UserError(f"{filler}: grace is {spec.grace:g}; 0 s or more is allowed")
    if not spec.command:
        raise UserError(f"{filler}: command is empty; it needs at least one word")
    if spec.pool not in config.pools and config.node(spec.pool) is None:
        raise UserError(f"{filler}: there is no pool or node {spec.pool!r}; there are {config.describe_pools()}")


def _check_job(job: str, spec: JobSpec, config: Config) -> None:
    if unknown := sorted(set(spec.gpus) - set(SIDES)):
        raise UserError(f"{job}: gpus has {unknown[0]!r}; allowed: rollout, train")
    if spec.restarts < 0:
        raise UserError(f"{job}: restarts is {spec.restarts}; 0 or more is allowed")
    if spec.slo is not None and not 1 <= spec.slo < math.inf:
        raise UserError(f"{job}: slo is {spec.slo:g}; a factor of at least 1 is allowed")
    if spec.nodes == "auto":
        if config.placement is None:
            raise UserError(
                f"{job} names no nodes; it needs rollout and train, each with a node, or `placement: scheduler` under"
                " `coordinator`"
            )
        return
    if set(spec.nodes) != set(SIDES) or not all(spec.nodes.values()):
        raise UserError(f"{job}: nodes has {sorted(spec.nodes)}; it needs rollout and train, each with a node")
    for side, nodes in spec.nodes.items():
        gpus = spec.gpus.get(side, 1)
        for name in nodes:
            if (node := config.node(name)) is None:
                raise UserError(f"{job}: there is no node {name!r}; there are {config.describe_pools()}")
            if not 0 <= gpus <= node.gpus:
                raise UserError(f"{job} asks for {gpus} GPUs on node {name!r}, which has {node.gpus}")


def _check_name(name: str, kind: str) -> None:
    """A job's name is a folder of its run and a word of its command line."""
    if not _NAME.fullmatch(name):
        raise UserError(f"{kind} {name!r}: a name is letters, digits, '.', '-' and '_', and begins with a letter or digit")
    if name in KEPT:
        raise UserError(f"{kind} {name!r}: the run keeps {KEPT[name]} under that name; choose another")


def fill(texts: list[str], run: RunFile, job: str = "", seed: int = 0) -> list[str]:
    """Replace {dir}, {job}, {seed} and {here}; `python` as a command is this interpreter."""
    values = {"dir": str(run.directory), "job": job, "seed": str(seed), "here": run.here}
    filled = [re.sub(r"\{(dir|job|seed|here)\}", lambda mark: values[mark[1]], text) for text in texts]
    return [sys.executable, *filled[1:]] if filled and filled[0] == "python" else filled


def interpreter(spec: JobSpec, run: RunFile) -> str:
    """The path of the job's Python."""
    named = fill([spec.python], run)[0]
    return os.path.abspath(shutil.which(named) or named)
