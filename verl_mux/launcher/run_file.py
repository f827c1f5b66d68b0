"""The YAML file of `verl-mux run`: one coordinator and several verl jobs, on this machine or on hosts.

    dir: runs/demo                       # everything the run writes
    prepare: [[python, make_data.py]]    # commands run before, side by side
    environment: {NAME: value}           # for all jobs
    coordinator: {pools: ..., schedule: ...}
    config_name: mux_ppo_trainer         # verl's primary config
    overrides: [key=value, ...]          # for all jobs
    hosts: {gpu-07: {via: ssh}}          # the nodes' hosts and how a command is started there (host_parts.py); none: all here
    bind: 10.0.0.1                       # with hosts: where they reach the coordinator
    keys: /secure/mux_keys               # of the coordinator, on this machine; default: made for the run
    ray: {num_cpus: 64}                  # with hosts: `ray start` options of each node
    agents: true                         # with hosts: an agent on each while the jobs run; false: you start them yourself
    clean_up: [[sh, tidy.sh]]            # commands run when all is over, one after the other
    resume: true                         # jobs go on from their checkpoints in `dir` instead of starting anew
    jobs:
      NAME: {nodes: {rollout: [r0], train: [t0]}, gpus: {rollout: 1, train: 1}, seed: 1, overrides: [...]}
      OTHER: {slo: 1.5, after: [NAME]} # no nodes: a coordinator with `placement: scheduler` chooses them
      THIRD: {nodes: ..., restarts: 2} # when it fails or is killed it is started again, at most twice, from its last checkpoint
    fillers:                             # run where no job does, until the jobs have ended; see docs/hold.md
      NAME: {pool: train, command: [python, train.py]}

{dir}, {job}, {seed} and {here}, the folder of the run file, are replaced in commands and overrides.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

import msgspec

from verl_mux.coordinator.bus.messages import SIDES
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.core.settings import Config
from verl_mux.errors import UserError
from verl_mux.launcher.host_parts import HostSpec, Way, parts
from verl_mux.launcher.host_setup import Part, RayOptions
from verl_mux.yaml_file import read_yaml

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Folders of a run that are no job's.
COORDINATOR, EARLIER = "coordinator", "earlier"
KEPT = {COORDINATOR: "the coordinator's files", EARLIER: "earlier runs"}

# What is allowed where a word may stand.
_WORDS = {HostSpec: f"{', '.join(get_args(Way))}, or a list of words"}


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One verl job. `nodes`: the coordinator's nodes by side, or `auto`; `gpus`: logical or real GPUs it uses on each node
    of a side. `slo`: how many times its iteration alone one may last, for a job that the coordinator places. `after`: jobs
    that must have ended before it is started. `restarts`: how often it is started again, from its newest checkpoint, when it
    ended with an error other than in its keys."""

    nodes: dict[str, list[str]] | Literal["auto"] = "auto"
    gpus: dict[str, int] = msgspec.field(default_factory=lambda: {"rollout": 1, "train": 1})
    seed: int = 0
    overrides: list[str] = []
    environment: dict[str, str] = {}
    slo: float | None = None
    after: list[str] = []
    restarts: int = 0


class FillerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command that uses what the jobs leave: the options of `verl-mux hold`. Times in seconds."""

    pool: str
    command: list[str]
    nodes: int = 1
    grace: float = 0.5
    least: float = 0.0
    environment: dict[str, str] = {}


class RunFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module's docstring. Times in seconds. `at`: the address of a coordinator that runs already; `coordinator` then
    holds the pools that it answered with."""

    dir: str
    coordinator: dict[str, Any]
    at: str | None = None
    jobs: dict[str, JobSpec]
    fillers: dict[str, FillerSpec] = {}
    config_name: str = "mux_ppo_trainer"
    prepare: list[list[str]] = []
    environment: dict[str, str] = {}
    overrides: list[str] = []
    hosts: dict[str, HostSpec] = {}
    bind: str | None = None
    keys: str | None = None
    ray: RayOptions = RayOptions()
    agents: bool = True
    clean_up: list[list[str]] = []
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
        if self.keys is not None:
            return Path(self.keys)
        return self.directory / COORDINATOR / "keys" if self.bind is not None else None

    @property
    def towards(self) -> str:
        """Where the hosts reach the coordinator, without the port."""
        return self.bind or urlsplit(self.at or "").hostname or "127.0.0.1"


def read(path: Path, directory: Path | None = None, resume: bool = False, more: dict[str, Any] | None = None) -> RunFile:
    """Read and check a run file. `directory` replaces its `dir`; `resume` sets that key, `more` any others.

    Raises:
        UserError: what was given, and what is allowed.
    """
    given = read_yaml(path)
    if directory is not None and isinstance(given, dict):
        given["dir"] = str(directory)
    if isinstance(given, dict):
        given["here"] = str(path.absolute().parent)
        if resume:
            given["resume"] = True
        given.update(more or {})
    try:
        run = msgspec.convert(given, RunFile)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {_explain(given, error)}") from None
    _check(path, run)
    return run


def _explain(given: Any, error: msgspec.ValidationError) -> str:
    """The error with the name of the job, filler or host, which msgspec leaves out, and with what is allowed there."""
    for what, key, kind in (("job", "jobs", JobSpec), ("filler", "fillers", FillerSpec), ("host", "hosts", HostSpec)):
        specs = given.get(key) if isinstance(given, dict) else None
        for name, spec in specs.items() if isinstance(specs, dict) else ():
            try:
                msgspec.convert(spec, kind)
            except msgspec.ValidationError as inner:
                return f"{what} {name!r}: {_allowed(inner, f'a {what}', kind)}"
    if isinstance(given, dict) and "ray" in given:
        try:
            msgspec.convert(given["ray"], RayOptions)
        except msgspec.ValidationError as inner:
            return f"ray: {_allowed(inner, 'it', RayOptions)}"
    return _allowed(error, "a run file", RunFile)


def _allowed(error: msgspec.ValidationError, what: str, kind: type[msgspec.Struct]) -> str:
    if "enum" in str(error) and kind in _WORDS:
        return f"{error}; allowed: {_WORDS[kind]}"
    return f"{error}; {what} has {', '.join(f for f in kind.__struct_fields__ if f not in ('here', 'at'))}"


def _check(path: Path, run: RunFile) -> None:
    if not run.jobs:
        raise UserError(f"{path}: `jobs` is empty; at least one is needed")
    config = run.coordinator_config()
    _check_hosts(path, run)
    for name, filler in run.fillers.items():
        _check_filler(path, name, filler, run, config)
    for name, job in run.jobs.items():
        _check_name(path, name)
        _check_after(path, name, run)
        if unknown := sorted(set(job.gpus) - set(SIDES)):
            raise UserError(f"{path}: job {name!r}: gpus has {unknown[0]!r}; allowed: rollout, train")
        if job.restarts < 0:
            raise UserError(f"{path}: job {name!r}: restarts is {job.restarts}; 0 or more is allowed")
        if job.slo is not None and not 1 <= job.slo < math.inf:
            raise UserError(f"{path}: job {name!r}: slo is {job.slo:g}; a factor of at least 1 is allowed")
        if job.nodes == "auto":
            _check_auto(path, name, config)
            continue
        if set(job.nodes) != set(SIDES) or not all(job.nodes.values()):
            raise UserError(f"{path}: job {name!r}: nodes has {sorted(job.nodes)}; it needs rollout and train, each with a node")
        for side, nodes in job.nodes.items():
            for node in nodes:
                _check_node(f"{path}: job {name!r}", node, job.gpus.get(side, 1), config)
        if run.hosts:
            parts_of(job, run)


def _check_hosts(path: Path, run: RunFile) -> None:
    if not run.hosts:
        return
    if run.bind is None and run.at is None:
        raise UserError(
            f"{path}: there are `hosts` and no `bind`: the address of this machine at which they reach the coordinator"
        )
    if run.bind in ("0.0.0.0", "::"):
        raise UserError(f"{path}: bind is {run.bind}; one address of this machine is needed, at which the hosts reach it")
    folders = {agent_folder(host): host for host in run.hosts}
    if taken := [name for name in (*run.jobs, *run.fillers) if name in folders]:
        raise UserError(
            f"{path}: job {taken[0]!r}: the run keeps the agent of {folders[taken[0]]!r} under that name; choose another"
        )
    if auto := [name for name, job in run.jobs.items() if job.nodes == "auto"]:
        raise UserError(
            f"{path}: job {auto[0]!r} names no nodes; with `hosts` each job does, as its Ray cluster is started there"
        )


def parts_of(job: JobSpec, run: RunFile) -> list[Part]:
    """The job's part on each of its hosts. The first of its training nodes is Ray's head. Raises UserError."""
    assert job.nodes != "auto"
    config = run.coordinator_config()
    names = dict.fromkeys([*job.nodes["train"], *job.nodes["rollout"]])
    return parts([config.nodes[name] for name in names], reached(run))


def agent_folder(host: str) -> str:
    """What the agent of a host leaves, in the run's folder."""
    return f"agent-{host}"


def agent_hosts(run: RunFile) -> list[str]:
    """The hosts on which the run keeps an agent."""
    return list(run.hosts) if run.agents else []


def reached(run: RunFile) -> dict[str, HostSpec]:
    """The hosts, with the words that lead there filled in."""
    via = {name: spec.via if isinstance(spec.via, str) else fill(spec.via, run) for name, spec in run.hosts.items()}
    return {name: msgspec.structs.replace(spec, via=via[name]) for name, spec in run.hosts.items()}


def _check_filler(path: Path, name: str, filler: FillerSpec, run: RunFile, config: Config) -> None:
    _check_name(path, name, "filler")
    if name in run.jobs:
        raise UserError(f"{path}: {name!r} names both a job and a filler; each needs a name of its own")
    if filler.nodes < 1:
        raise UserError(f"{path}: filler {name!r}: nodes is {filler.nodes}; 1 or more is allowed")
    for key in ("grace", "least"):
        if not 0 <= (seconds := getattr(filler, key)) < math.inf:
            raise UserError(f"{path}: filler {name!r}: {key} is {seconds:g}; 0 s or more is allowed")
    if not filler.command:
        raise UserError(f"{path}: filler {name!r}: command is empty; it needs at least one word")
    if filler.pool not in config.pools and config.node(filler.pool) is None:
        raise UserError(f"{path}: filler {name!r}: there is no pool or node {filler.pool!r}; there are {config.describe_pools()}")


def _check_auto(path: Path, name: str, config: Config) -> None:
    if config.placement is None:
        raise UserError(
            f"{path}: job {name!r} names no nodes; it needs rollout and train, each with a node, or `placement: scheduler`"
            " under `coordinator`"
        )


def _check_after(path: Path, name: str, run: RunFile) -> None:
    """Every job that is waited for is there, and does not wait for this one in turn."""
    reached, ahead = set(), list(run.jobs[name].after)
    while ahead:
        other = ahead.pop()
        if other not in run.jobs:
            raise UserError(f"{path}: job {name!r}: after has {other!r}; there are {', '.join(run.jobs)}")
        if other == name:
            raise UserError(f"{path}: job {name!r} waits for its own end; `after` must not lead back to the job")
        if other not in reached:
            reached.add(other)
            ahead += run.jobs[other].after


def _check_name(path: Path, name: str, whose: str = "job") -> None:
    """A job's name is a folder of its run and a word of its command line."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{path}: {whose} {name!r}: a name is letters, digits, '.', '-' and '_', and begins with a letter or digit"
        )
    if name in KEPT:
        raise UserError(f"{path}: {whose} {name!r}: the run keeps {KEPT[name]} under that name; choose another")


def _check_node(job: str, name: str, gpus: int, config: Config) -> None:
    node = config.node(name)
    if node is None:
        raise UserError(f"{job}: there is no node {name!r}; there are {config.describe_pools()}")
    if not 0 <= gpus <= node.gpus:
        raise UserError(f"{job} asks for {gpus} GPUs on node {name!r}, which has {node.gpus}")


def fill(texts: list[str], run: RunFile, job: str = "", seed: int = 0) -> list[str]:
    """Replace {dir}, {job}, {seed} and {here}; `python` as a command is this interpreter."""
    values = {"{dir}": str(run.directory), "{job}": job, "{seed}": str(seed), "{here}": run.here}
    filled = []
    for text in texts:
        for mark, value in values.items():
            text = text.replace(mark, value)
        filled.append(text)
    return [sys.executable, *filled[1:]] if filled and filled[0] == "python" else filled
