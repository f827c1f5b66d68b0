"""Jobs with real child trees: whatever carries the job's mark ends with it, and nothing else does."""

import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import nullcontext as nothing
from pathlib import Path

import psutil
import pytest

from verl_mux import __version__
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.errors import UserError
from verl_mux.launcher.run_file import FillerSpec, JobSpec, RunFile
from verl_mux.launcher.run_processes import JobProcess, filler_process, finish_filler, require_verl

# Says its pid through the pipe named on its command line, then waits for a signal.
WAITER = """
import os, signal, sys
for name in sys.argv[2:]:
    signal.signal(getattr(signal, name), signal.SIG_IGN)
with open(sys.argv[1], "w") as pipe:
    pipe.write(f"{os.getpid()}\\n")
signal.pause()
"""
# A driver with a child in a session of its own, as Ray's daemons are; it then does what WAITER does.
DRIVER = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {WAITER!r}, sys.argv[1], "SIGINT", "SIGTERM"], start_new_session=True)
{WAITER}
"""


def make_job(tmp_path: Path, code: str, *arguments: str, **environment: str) -> JobProcess:
    spec = JobSpec(nodes={"rollout": ["r0"], "train": ["t0"]}, environment=environment)
    job = JobProcess("math", spec, RunFile(dir=str(tmp_path), coordinator={}, jobs={"math": spec}), None)
    job._command = [sys.executable, "-c", code, *arguments]
    return job


@pytest.fixture
def pipe(tmp_path) -> Path:
    path = tmp_path / "pids"
    os.mkfifo(path)
    return path


@pytest.fixture
def start(tmp_path) -> Iterator:
    jobs = []

    def started(code: str, *arguments: str, **environment: str) -> JobProcess:
        jobs.append(make_job(tmp_path, code, *arguments, **environment))
        jobs[-1].start()
        return jobs[-1]

    yield started
    for job in jobs:
        job.sweep()


def pids_from(pipe: Path, count: int) -> set[int]:
    """Waits until `count` processes have said that they are ready."""
    found: set[int] = set()
    while len(found) < count:
        found |= {int(line) for line in pipe.read_text().split()}
    return found


def runs(pid: int) -> bool:
    """A dead process may stay a zombie where no process collects orphans."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_stop_ends_a_grandchild_that_left_the_session_and_ignores_signals(start, pipe):
    job = start(DRIVER, str(pipe))
    pids = pids_from(pipe, 2)
    assert {p.pid for p in job.processes()} == pids and job.returncode is None
    assert len({os.getsid(pid) for pid in pids}) == 2
    job.stop()
    assert job.processes() == [] and not any(runs(pid) for pid in pids)
    assert job.returncode == -signal.SIGINT


@pytest.mark.parametrize(
    ("ignored", "ends_with", "patience"),
    [(["SIGINT"], signal.SIGTERM, 4.0), (["SIGINT", "SIGTERM"], signal.SIGKILL, 0.4)],  # one that is to end may be starved
)
def test_a_driver_that_does_not_listen_is_made_to_end_and_its_exit_code_is_kept(start, pipe, ignored, ends_with, patience):
    job = start(WAITER, str(pipe), *ignored)
    pids_from(pipe, 1)
    job.stop(patience)
    assert job.returncode == -ends_with


def test_what_a_dead_driver_left_behind_is_swept(start, pipe):
    job = start(DRIVER, str(pipe))
    pids = pids_from(pipe, 2)
    os.kill(job._process.pid, signal.SIGKILL)
    job._process.wait()
    assert {p.pid for p in job.processes()} == pids - {job._process.pid}
    job.sweep()
    assert job.processes() == [] and job.returncode == -signal.SIGKILL


def test_another_jobs_processes_and_strangers_live_on(start, pipe):
    job, other = start(WAITER, str(pipe)), start(WAITER, str(pipe))
    stranger = subprocess.Popen([sys.executable, "-c", WAITER, str(pipe)], env={**os.environ, UID_VARIABLE: f"{job.uid}x"})
    try:
        pids_from(pipe, 3)
        job.stop()
        assert (job.returncode, other.returncode, stranger.poll()) == (-signal.SIGINT, None, None)
    finally:
        stranger.kill()
        stranger.wait()


def test_a_job_that_was_never_started_is_stopped_without_a_word(tmp_path):
    job = make_job(tmp_path, "")
    job.stop()
    job.sweep()
    assert job.returncode is None and job.last_error() == "it wrote nothing"


def test_output_exit_code_and_environment_are_the_jobs_own(start, tmp_path):
    job = start("import os, sys; print(os.environ['COLOUR'], os.getcwd(), file=sys.stderr); sys.exit(3)", COLOUR="blue")
    assert job._process.wait() == job.returncode == 3
    assert job.log_path.read_text() == f"blue {tmp_path / 'math'}\n"


OURS = "verl_mux.errors.Failure: replica 0 could not start: no room; held by code"


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("", "it wrote nothing"),
        ("one\ntwo\n", "two"),
        ("Traceback (most recent call last):\n  File x\nValueError: bad\nbye\n", "ValueError: bad"),
        ("(TaskRunner pid=7)  Error in a frame\n  SomeError: indented\nbye\n", "(TaskRunner pid=7)  Error in a frame"),
        ("ValueError: early\nverl-mux: unknown key mux.x\nbye\n", "verl-mux: unknown key mux.x"),
        ("verl-mux: first\nray.exceptions.RayTaskError: later\n", "ray.exceptions.RayTaskError: later"),
        (
            "Could not override 'a.b'.\nKey 'b' is not in struct\n\nSet the environment variable HYDRA_FULL_ERROR=1\n",
            "Could not override 'a.b'.",
        ),
        (f"ray.exceptions.ActorDiedError: died\n\n{OURS}\n\nSet the environment variable HYDRA_FULL_ERROR=1\n", OURS),
    ],
)
def test_the_line_that_says_most_about_the_end(tmp_path, log, line):
    job = make_job(tmp_path, "")
    job.directory.mkdir()
    if log:
        job.log_path.write_text(log)
    assert job.last_error() == line


def test_a_failure_of_ours_in_an_actor_is_told_in_its_words_alone(start):
    job = start(f"import sys; print({OURS!r}); sys.exit(1)")
    job._process.wait()
    assert job.how_it_ended() == "ended with exit code 1: replica 0 could not start: no room; held by code"


@pytest.mark.parametrize("directory", ["plain", "with space", "a,b=c", "it's [here]", "1e5"])
@pytest.mark.parametrize("name", ["math", "1e5", "null", "qwen2.5-7b", "true"])
def test_hydra_reads_names_and_folders_as_they_were_meant(tmp_path, directory, name):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    spec = JobSpec(nodes={"rollout": ["r0", "1"], "train": ["t0"]}, seed=5, overrides=["data.seed={seed}"])
    run = RunFile(
        dir=str(tmp_path / directory), coordinator={}, jobs={name: spec}, overrides=["+job={job}", "mux.launch.warm=false"]
    )
    command = JobProcess(name, spec, run, "tcp://127.0.0.1:5570")._command
    assert command[4:7] == ["verl.trainer.main_ppo", "--config-name", "mux_ppo_trainer"]
    given = {o.key_or_group: o.value() for o in OverridesParser.create().parse_overrides(command[7:])}
    assert (str(given["mux.job"]), str(given["trainer.experiment_name"])) == (name, name)
    assert [str(n) for n in given["mux.nodes.rollout"]] == ["r0", "1"]
    assert str(given["mux.coordinator"]) == "tcp://127.0.0.1:5570"
    assert str(given["mux.profile.dir"]) == str(tmp_path / directory / name / "events")
    assert str(given["trainer.default_local_dir"]) == str(tmp_path / directory / name / "checkpoints")
    assert (given["mux.seed"], given["data.seed"]) == (5, 5)


def test_of_a_log_of_weeks_only_the_end_is_read(tmp_path):
    job = make_job(tmp_path, "")
    job.log_path.parent.mkdir(parents=True)
    with job.log_path.open("wb") as log:
        log.truncate(64 << 20)  # no bytes on the disk
        log.seek(0, os.SEEK_END)
        log.write(b"\nverl-mux: it was this\n")
    tracemalloc.start()
    assert job.last_error() == "verl-mux: it was this"
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()


def test_a_submitted_jobs_workers_get_the_mark_and_the_environment_but_in_no_command_line(tmp_path):
    spec = JobSpec(nodes={"rollout": ["r0"], "train": ["t0"]}, environment={"COLOUR": "blue"})
    given = {"dir": str(tmp_path), "coordinator": {}, "submit": "http://10.0.0.1:8265", "environment": {"COLOUR": "red"}}
    run = RunFile(**given, jobs={"a": spec}, bind="tcp://10.0.0.1:5570")
    job = JobProcess("a", spec, run, "tcp://10.0.0.1:5570")
    job.uid = "secret"
    assert not any("secret" in word for word in job._command)
    assert f"mux.keys='{tmp_path}/keys'" in job._command
    given = job.environment()
    workers = json.loads(given["RAY_JOB_CONFIG_JSON_ENV_VAR"])["runtime_env"]["env_vars"]
    assert workers.pop("RAY_OVERRIDE_JOB_RUNTIME_ENV") == "1"
    assert workers == {"COLOUR": "blue", UID_VARIABLE: "secret"} and given[UID_VARIABLE] == "secret"


@pytest.mark.parametrize(
    ("word", "platform", "warm"),
    [("mux.launch.warm=true", "", True), ("mux.launch.warm=null", "", False), ("mux.launch.warm=null", "cpu", True)],
)
def test_a_submitted_job_finds_its_cluster_by_itself_and_its_driver_is_what_a_user_would_submit(tmp_path, word, platform, warm):
    nodes = {"rollout": ["r0"], "train": ["t0"]}
    spec = JobSpec(nodes=nodes, overrides=[word], environment={"VERL_PLATFORM": platform})
    run = RunFile(dir=str(tmp_path), coordinator={}, jobs={"a": spec}, submit="http://10.0.0.1:8265")
    job = JobProcess("a", spec, run, "tcp://10.0.0.1:5570")
    forks = ["verl_mux.warm.fork_server"] if warm else []
    assert job._command[4 : 7 + warm] == ["verl_mux.warm.submitted", run.submit, *forks, "verl.trainer.main_ppo"]
    assert "++ray_kwargs.ray_init.address=null" in job._command and "++ray_kwargs.ray_init.num_cpus=null" in job._command
    assert "RAY_JOB_CONFIG_JSON_ENV_VAR" in job.environment()


def test_a_job_without_one_starts_its_own(tmp_path):
    spec = JobSpec(nodes={"rollout": ["r0"], "train": ["t0"]})
    job = JobProcess("math", spec, RunFile(dir=str(tmp_path), coordinator={}, jobs={"math": spec}), None)
    assert job._command[-1] == "++ray_kwargs.ray_init.address=local" and "mux.coordinator=null" in job._command
    assert "RAY_JOB_CONFIG_JSON_ENV_VAR" not in job.environment()


# Leaves its exit code, as `keep_exit_code` does, and is gone only when the pipe is written to.
ENDING = """
import pathlib, sys
half = pathlib.Path("half")
half.write_text("5\\n")
half.rename("exit_code")
open(sys.argv[1]).read()
raise SystemExit(5)
"""


def test_a_filler_that_has_just_failed_is_named_although_its_process_is_not_gone_yet(tmp_path, pipe):
    spec = FillerSpec(pool="rollout", command=["true"])
    run = RunFile(dir=str(tmp_path), coordinator={}, jobs={}, fillers={"sums": spec})
    filler = filler_process("sums", spec, run, "tcp://127.0.0.1:1")
    filler._command = [sys.executable, "-c", ENDING, str(pipe)]
    filler.start()
    while not (filler.directory / "exit_code").exists():
        assert filler.returncode is None
    wait = filler._wait

    def gone_when_waited_for(seconds):
        if pipe.exists():
            pipe.write_text("")
            pipe.unlink()
        wait(seconds)

    filler._wait = gone_when_waited_for
    assert (finish_filler(filler) or "").startswith("filler sums ended with exit code 5")


@pytest.mark.parametrize(("version", "verl", "refused"), [("", "verl", False), ("0.0.1", "verl", True), ("", "other", True)])
def test_a_jobs_own_python_needs_verl_and_the_same_verl_mux(tmp_path, version, verl, refused):
    for package in (verl, "verl_mux"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"__version__ = {version or __version__!r}\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    spec = JobSpec(nodes={"rollout": ["r0"], "train": ["t0"]}, python=str(python))
    run = RunFile(dir=str(tmp_path), coordinator={}, jobs={"math": spec})
    assert JobProcess("math", spec, run, None)._command[0] == str(python)
    with (
        pytest.raises(UserError, match=f"'math': .*/python has not both, verl and verl_mux {__version__}")
        if refused
        else nothing()
    ):
        require_verl(run)
