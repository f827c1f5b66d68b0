"""The YAML file of `verl-mux run`: one coordinator and several verl jobs, which this machine starts. Its keys: docs/run_file.md.

Runs in `verl-mux run`, `verl-mux plan` and bench/; reads the file only.
"""

from __future__ import annotations

import graphlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from verl_mux.coordinator.bus.messages import SIDES
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.core.settings import Config
from verl_mux.errors import UserError
from verl_mux.yaml_file import Mistake, Mistakes, read_as, read_yaml

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Folders of a run that are no job's. Agents on hosts log to AGENTS.
COORDINATOR, EARLIER, AGENTS, KEYS = "coordinator", "earlier", "agents", "keys"
KEPT = {COORDINATOR: "the coordinator's files", EARLIER: "earlier runs", AGENTS: "the agents' logs", KEYS: "the keys"}


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One verl job."""

    nodes: dict[str, list[str]] | Literal["auto"] = "auto"
    gpus: dict[str, int] = msgspec.field(default_factory=lambda: {"rollout": 1, "train": 1})
    seed: int = 0
    overrides: list[str] = []
    environment: dict[str, str] = {}
    slo: Annotated[float, Meta(ge=1, le=10**9)] | None = None
    after: list[str] = []
    restarts: Annotated[int, Meta(ge=0)] = 0
    python: str = "python"


class FillerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of `verl-mux hold`. Times in seconds."""

    pool: str
    command: Annotated[list[str], Meta(min_length=1)]
    nodes: Annotated[int, Meta(ge=1)] = 1
    grace: Annotated[float, Meta(ge=0, le=10**9)] = 0.5
    environment: dict[str, str] = {}


class RunFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times in seconds. `at`: the address of a coordinator that runs already; `coordinator` then holds the pools that it answered
    with. `submit`: URL of the job server of the Ray cluster that all jobs are submitted to."""

    INTERNAL: ClassVar = ("at", "here", "submit")  # no keys of the file

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
    """Read and check a run file. `directory` replaces its `dir`; `resume` sets that key, `more` any others. Raises UserError: all
    that is wrong in it, each with what was given and what is allowed."""
    given = given_by(path)
    if isinstance(given, dict):
        replaced = {"dir": str(directory)} if directory is not None else {}
        given = {**given, **replaced, "here": str(path.absolute().parent), **({"resume": True} if resume else {}), **(more or {})}
    try:
        run = read_as(given, RunFile)
        if wrong := list(_unfitting(run)):
            raise Mistakes(wrong)
    except Mistakes as mistakes:
        if isinstance(given, dict) and not any(at[:1] == ("coordinator",) for at, _ in mistakes.each):
            mistakes = Mistakes([*mistakes.each, *_coordinator(given.get("coordinator"))[1]])
        raise mistakes.in_file(path, *_bases(path)) from None
    return run


def given_by(path: Path) -> Any:
    """What a run file says, and the file that it names as `base`. Raises UserError."""
    given = read_yaml(path)
    base = given.pop("base", None) if isinstance(given, dict) else None
    return given if base is None else _joined(read_yaml(path.parent / str(base)), given)


def _bases(path: Path) -> list[Path]:
    base = read_yaml(path)
    return [path.parent / str(base["base"])] if isinstance(base, dict) and base.get("base") is not None else []


def _joined(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {**one, **{key: _joined(one[key], value) if key in one else value for key, value in other.items()}}
    return [*one, *other] if isinstance(one, list) and isinstance(other, list) else other


def _coordinator(keys: Any) -> tuple[Config | None, list[Mistake]]:
    try:
        return make_config(keys) if isinstance(keys, dict) else None, []
    except Mistakes as mistakes:
        return None, [(("coordinator", *at), text) for at, text in mistakes.each]
    except UserError as error:
        return None, [(("coordinator",), str(error))]


def _unfitting(run: RunFile) -> Iterator[Mistake]:
    """What a run file says that does not go together."""
    if not run.jobs:
        yield ("jobs",), "`jobs` is empty; at least one is needed"
    if run.bind is not None and re.match(r"tcp://(0\.0\.0\.0|\[::\]|\*)?:", run.bind):
        yield ("bind",), f"bind is {run.bind}; one address of this machine is needed, at which the hosts reach it"
    config, mistakes = _coordinator(run.coordinator_keys())
    yield from mistakes
    for name, filler in run.fillers.items():
        wrong = list(_wrong_name(name, "filler"))
        if config is not None and filler.pool not in config.pools and config.node(filler.pool) is None:
            wrong.append(f"filler {name!r}: there is no pool or node {filler.pool!r}; there are {config.describe_pools()}")
        if name in run.jobs:
            wrong.append(f"{name!r} names both a job and a filler; each needs a name of its own")
        yield from ((("fillers", name), text) for text in wrong)
    for name, job in run.jobs.items():
        wrong = [*_wrong_name(name, "job"), *_wrong_job(f"job {name!r}", job, config)]
        if missing := [other for other in job.after if other not in run.jobs]:
            wrong.append(f"job {name!r}: after has {missing[0]!r}; there are {', '.join(run.jobs)}")
        if shutil.which(python := interpreter(job, run)) is None:
            wrong.append(f"job {name!r}: python is {job.python}, and there is no program {python}")
        yield from ((("jobs", name), text) for text in wrong)
    try:
        graphlib.TopologicalSorter({name: job.after for name, job in run.jobs.items()}).prepare()
    except graphlib.CycleError as error:
        chain = " -> ".join(map(repr, error.args[1]))
        yield ("jobs",), f"job {chain}: waits for its own end; `after` must not lead back to the job"


def _wrong_job(job: str, spec: JobSpec, config: Config | None) -> Iterator[str]:
    """config: None: nodes are not known, as the coordinator's part is wrong itself."""
    if unknown := sorted(set(spec.gpus) - set(SIDES)):
        yield f"{job}: gpus has {unknown[0]!r}; allowed: rollout, train"
    if spec.nodes == "auto":
        if config is not None and config.placement is None:
            ways = "it needs rollout and train, each with a node, or `placement: scheduler` under `coordinator`"
            yield f"{job} names no nodes; {ways}"
        return
    if set(spec.nodes) != set(SIDES) or not all(spec.nodes.values()):
        yield f"{job}: nodes has {sorted(spec.nodes)}; it needs rollout and train, each with a node"
    for side, nodes in spec.nodes.items() if config is not None else ():
        gpus = spec.gpus.get(side, 1)
        for name in nodes:
            if (node := config.node(name)) is None:  # type: ignore[union-attr]
                yield f"{job}: there is no node {name!r}; there are {config.describe_pools()}"  # type: ignore[union-attr]
            elif not 0 <= gpus <= node.gpus:
                yield f"{job} asks for {gpus} GPUs on node {name!r}, which has {node.gpus}"


def _wrong_name(name: str, kind: str) -> Iterator[str]:
    """A job's name is a folder of its run and a word of its command line."""
    if not _NAME.fullmatch(name):
        yield f"{kind} {name!r}: a name is letters, digits, '.', '-' and '_', and begins with a letter or digit"
    elif name in KEPT:
        yield f"{kind} {name!r}: the run keeps {KEPT[name]} under that name; choose another"


def fill(texts: list[str], run: RunFile, job: str = "", seed: int = 0) -> list[str]:
    """Replace {dir}, {job}, {seed} and {here}; `python` as a command is this interpreter."""
    values = {"dir": str(run.directory), "job": job, "seed": str(seed), "here": run.here}
    filled = [re.sub(r"\{(dir|job|seed|here)\}", lambda mark: values[mark[1]], text) for text in texts]
    return [sys.executable, *filled[1:]] if filled and filled[0] == "python" else filled


def interpreter(spec: JobSpec, run: RunFile) -> str:
    """The path of the job's Python."""
    named = fill([spec.python], run)[0]
    return os.path.abspath(shutil.which(named) or named)
