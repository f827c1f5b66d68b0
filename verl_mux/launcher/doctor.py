"""`verl-mux doctor`: is everything on this machine that a multiplexed job needs? One line a check, with what to do about it (with
--gpu those of doctor_gpu.py). And of a job that is given: what of its config is refused, changed or untried, one line a key.

Runs on the command line; called by cli.py; starts one Python interpreter, writes nothing.
Of a job nothing is started; its command is only composed.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from verl_mux import upstream
from verl_mux.composed_config import at
from verl_mux.config.completion import judge
from verl_mux.config.job_checks import ANY_VERSION, is_supported, version_of
from verl_mux.errors import Failure, UserError
from verl_mux.launcher.doctor_gpu import Check, gpu_checks, read_machine
from verl_mux.launcher.plan_memory import certificate, configs_of
from verl_mux.launcher.run_processes import composed, require_verl
from verl_mux.platform.choose import accelerator_present, cpu_package_missing, cpu_platform_wanted
from verl_mux.platform.cuda_packages import FLASH_ATTENTION
from verl_mux.platform.host_memory import room
from verl_mux.rollout.engine.record import engines, installed
from verl_mux.yaml_file import read_yaml

_MAIN = "verl.trainer.main_ppo"
_DEMO_HOST_GIB, _DEMO_SHM_GIB, _DEMO_DISK_GIB = 16, 1, 2

_REGISTERED = """
import logging; logging.disable(logging.WARNING)
import json, verl.trainer.ppo.v1
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
from verl.checkpoint_engine import CheckpointEngineRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
paths = [p.__name__ for p in Plugins.instance().discover(SearchPathPlugin)]
engine = CheckpointEngineRegistry.get("mux").__name__
modes = sorted(m for m in TRAINER_REGISTRY if m.startswith("mux"))
print(json.dumps({"modes": modes, "engine": engine, "hydra": "MuxSearchPath" in paths}))
"""


def doctor(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- CMD", help=f"Judge the job of this command: python -m {_MAIN} OVERRIDES.")
    ] = None,
    job: Annotated[Path | None, typer.Option(help="Judge the job of this composed verl config: what `--cfg job` prints.")] = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Check this machine's GPUs and what jobs on them need; --job may be a run file too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check this machine: plugin, versions, platform, memory, ports. Exit code 1 if the demo could not run.

    With a job: say what our trainer modes would refuse, change, or be the first to try. Exit code 1 if it is refused.
    With --gpu: exit code 1 if the first job on these GPUs would fail.
    """
    if gpu and command:
        raise UserError("--gpu goes with --job FILE and --json alone")
    if (command or job) and not gpu:
        return judge_job(command, job, as_json)
    checks = list(_gpu_checks(job) if gpu else run_checks())
    bad = [check.name for check in checks if check.ok is False]
    if as_json:
        print(json.dumps({"ok": not bad, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        console = Console(highlight=False)
        for check in checks:
            mark = {True: "[green]ok  [/]", None: "[yellow]note[/]", False: "[red]bad [/]"}[check.ok]
            advice = f"; {check.advice}" if check.advice and check.ok is not True else ""
            console.print(f"{mark} {check.name}: {check.found}{advice}", soft_wrap=True)
    if bad:
        raise Failure(f"{'the first job on GPUs' if gpu else 'the demo'} could not run here: {', '.join(bad)}")


def _gpu_checks(file: Path | None) -> Iterator[Check]:
    configs = list(configs_of(file)) if file else []
    needs = {node: host.total for node, host in certificate(configs).hosts.items()} if configs else {}
    attention = {at(config, "actor_rollout_ref.model.override_config.attn_implementation") for _, config in configs or [("", {})]}
    return gpu_checks(
        read_machine([engine.name for engine in installed()]), needs, {kind or FLASH_ATTENTION for kind in attention}
    )


def judge_job(command: list[str] | None, file: Path | None, as_json: bool) -> None:
    """Print what a start would make of this job. Raises Failure: it is refused; UserError: there is no one whole config."""
    if command and file:
        raise UserError("give either --job FILE or a command, not both")
    if file:
        where, config = str(file), read_yaml(file)
        if not isinstance(config, dict):
            raise UserError(f"{file} is no composed verl config: `python -m {_MAIN} OVERRIDES --cfg job > FILE` writes one")
    else:
        words = command or []
        if ["-m", _MAIN] not in [words[at : at + 2] for at in range(len(words))]:
            raise UserError(f"{' '.join(words)}: only `python -m {_MAIN} OVERRIDES` is composed here; of others give --job FILE")
        require_verl()
        where = "the command's config"
        config = composed([sys.executable, "-m", *words[words.index(_MAIN) :], "--cfg", "job"], where)
    found = judge(config, where)
    print(json.dumps(found, indent=2, default=str) if as_json else "\n".join(_judged(found)))
    if not found["accepted"]:
        raise Failure(f"this job is refused: {', '.join(dict.fromkeys(one['key'] for one in found['refusals']))}")


def _judged(found: dict[str, Any]) -> Iterator[str]:
    yield from (f"refused  {one['key']}: {one['reason']}" for one in found["refusals"])
    yield from (f"changed  {one['key']}: {one['given']} -> {one['to']} ({one['reason']})" for one in found["changes"])
    yield from (f"untried  {one['key']}={one['given']}: {one['reason']}" for one in found["untried"])
    if found["accepted"]:
        yield "accepted"


def run_checks() -> Iterator[Check]:
    """All checks, in the order in which a missing one would hurt."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield Check("python", (3, 10) <= sys.version_info[:2] <= (3, 12), version, "use Python 3.10, 3.11 or 3.12")
    made = installed() or list(engines().values())
    supported = upstream.SUPPORTED | {name: versions for engine in made for name, versions in engine.supported.items()}
    tested = upstream.TESTED | {name: version for engine in made for name, version in engine.tested.items()}
    yield from (_version(name, version, supported.get(name, "")) for name, version in tested.items())
    yield from (Check(name, True, "not in this environment") for name in engines() if name not in tested)
    yield _plugin()
    yield _platform()
    cores = len(os.sched_getaffinity(0))
    yield Check("cores", True if cores >= 2 else None, str(cores), "" if cores >= 2 else "two jobs on one core cannot overlap")
    needed = (
        f"two jobs of the demo need about {_DEMO_HOST_GIB} GiB; real ones keep weights and optimizer states of every job here"
    )
    memory = room()
    yield _enough("host memory", memory.available, _DEMO_HOST_GIB, needed, memory.source)
    yield _space("/dev/shm", _DEMO_SHM_GIB, "weights travel through shared memory where there is no GPU; enlarge /dev/shm")
    yield _space(os.getcwd(), _DEMO_DISK_GIB, "runs, checkpoints and logs go below the working directory; free some space")
    yield _ports()


def _version(name: str, tested: str, supported: str) -> Check:
    """`supported`: a range as in pyproject.toml, or "" for any."""
    if (found := version_of(name)) is None:
        advice = f"install {name}{supported or '==' + tested}, or `make demo`, which installs requirements/lock.txt"
        return Check(name, False, "not installed", advice)
    version = f"{found} (supported: {supported})" if supported else found
    if not is_supported(found, supported):
        advice = f"untried: install {name}{supported}, or set {ANY_VERSION}=1, with which a start takes it"
        return Check(name, None if os.environ.get(ANY_VERSION) else False, version, advice)
    same = found.split("+")[0] == tested
    return Check(name, True if same else None, version, "" if same else f"tested with {tested}; run tests/upstream")


def _plugin() -> Check:
    """Ask a fresh interpreter, as a job would find it: verl hides a plugin's failure at DEBUG level."""
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", _REGISTERED], capture_output=True, text=True, check=False)
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode or not lines:
        reason = (result.stderr.strip().splitlines() or ["no output"])[-1]
        return Check("plugin", False, reason, "verl could not load the entry point verl.plugins: reinstall verl-mux beside verl")
    found = json.loads(lines[-1])
    ok, text = found["modes"] == ["mux_colocate", "mux_separate"] and found["hydra"], ", ".join(found["modes"])
    return Check("plugin", ok, f"modes {text}; checkpoint engine mux", "" if ok else "reinstall verl-mux beside verl")


def _platform() -> Check:
    if not accelerator_present():
        if cpu_package_missing():
            advice = "to run jobs on this CPU, `pip install ./verl_mux_cpu` in a checkout of verl_mux"
            return Check("platform", False, "no accelerator, and verl-mux-cpu is not installed", advice)
        return Check("platform", True, "no accelerator: verl and the engine run on the CPU platform")
    if cpu_platform_wanted([]):
        found = "VERL_PLATFORM=cpu on a machine with an accelerator"
        return Check("platform", None, found, "unset VERL_PLATFORM to use the GPUs")
    if not shutil.which("nvidia-smi"):
        return Check("platform", True, "accelerator, no nvidia-smi")
    names = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return Check("platform", True, names.strip().replace("\n", "; "))


def _space(path: str, wanted: float, advice: str) -> Check:
    if not os.path.isdir(path):
        return Check(path, False, "is not there", advice)
    return _enough(path, shutil.disk_usage(path).free, wanted, advice)


def _enough(name: str, free: int, wanted_gib: float, advice: str, source: str = "") -> Check:
    ok = free >= wanted_gib * 2**30
    return Check(name, ok, f"{free / 2**30:.1f} GiB free{source and f' of {source}'}", "" if ok else advice)


def _ports() -> Check:
    """Ray, SGLang, TransferQueue and our bus bind ports of this machine's own address."""
    host = socket.gethostname()
    try:
        with socket.socket() as listener:
            listener.bind(("0.0.0.0", 0))
        address = socket.gethostbyname(host)
    except OSError as error:
        advice = "add this host's name to /etc/hosts; allow binding to local ports"
        return Check("ports", False, f"{host}: {error.strerror}", advice)
    return Check("ports", True, f"{host} is {address}")
