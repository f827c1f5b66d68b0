"""The wheel by itself, in a clean environment with what it declares: every command answers, and none with a traceback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from verl_mux.cli import CHECKOUT_COMMANDS, COMMANDS

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
EVERY_COMMAND = [[], *([name] for name in COMMANDS)]
NO_COORDINATOR = "tcp://127.0.0.1:1"

# A line for each command: what is given, how it ends, and a part of what it says. {root} is the repository.
TRIED = [
    ("top nowhere", 2, "nowhere does not exist: give the directory of a run"),
    ("coordinator --config none.yaml", 2, "cannot read none.yaml"),
    (f"status --address {NO_COORDINATOR}", 2, "no coordinator answers"),
    (f"evict math --yes --coordinator {NO_COORDINATOR}", 2, "no coordinator answers"),
    (f"release rollout0 --yes --coordinator {NO_COORDINATOR}", 2, "no coordinator answers"),
    ("agent --devices abacus", 2, "allowed: auto"),
    (f"hold --pool train --coordinator {NO_COORDINATOR} --timeout 0.2 -- true", 2, "no coordinator answers"),
    ("keys made/keys", 0, "keys in made/keys"),
    ("plan {root}/examples/placement/jobs.yaml --json", 0, '"group"'),
    ("plan none.yaml", 2, "cannot read none.yaml"),
    ("report .", 2, "verl-mux report needs polars: pip install 'verl-mux[report]'"),
    ("doctor", 1, "bad  verl: not installed"),
    ("run {root}/examples/demo.yaml --dir run", 2, "verl-mux run needs verl: uv pip install"),
    ("bench leases --json", 2, "`verl-mux bench` is not in the installed package: run it from a checkout"),
    ("simulate trace.csv", 2, "`verl-mux simulate` is not in the installed package: run it from a checkout"),
]


def _run(*command: object, cwd: Path, check: bool = True) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VERL_MUX"))}
    given = [str(word) for word in command]
    result = subprocess.run(given, capture_output=True, text=True, cwd=cwd, env=environment, timeout=180, check=False)
    assert not check or result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the sources, so that nothing left over from an earlier build gets in."""
    copy = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "verl_mux", copy / "verl_mux", ignore=shutil.ignore_patterns("__pycache__"))
    _run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "made", ".", cwd=copy)
    (made,) = (copy / "made").iterdir()
    return made


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory) -> Path:
    """The programs of a new environment that holds the wheel and what it declares."""
    place = tmp_path_factory.mktemp("clean")
    index = _run(sys.executable, "-m", "pip", "config", "get", "global.index-url", cwd=place, check=False).stdout.strip()
    named = ["--default-index", index] if index else []  # uv does not read pip's configuration
    _run(UV, "venv", "-q", "--clear", "--python", sys.executable, place, cwd=place)
    installed = _run(UV, "pip", "install", "-q", *named, "--python", place / "bin" / "python", wheel, cwd=place, check=False)
    if "error sending request" in installed.stderr:
        pytest.skip("no package index answers here")
    assert installed.returncode == 0, installed.stderr
    return place / "bin"


def test_it_holds_every_file_of_the_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    packed = {name for name in names if ".dist-info/" not in name}  # so nothing of verl_mux_cpu
    kept = (path for path in (ROOT / "verl_mux").rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert packed == {path.relative_to(ROOT).as_posix() for path in kept}
    assert {path.rpartition(".")[2] for path in packed} >= {"yaml", "html", "js", "css", "typed"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_it_is_found_where_a_script_starts_through_uv(wheel, tmp_path):
    """verl's examples sync their project's environment first, which takes out what was put into it; PYTHONPATH stays."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "trains"\nversion = "0"\nrequires-python = ">=3.10"\n')
    ask = "from importlib.metadata import entry_points; print([it.value for it in entry_points(group='verl.plugins')])"
    python = ("--offline", "--python", sys.executable)
    _run(UV, "lock", *python, cwd=tmp_path)
    _run(UV, "sync", "--frozen", *python, cwd=tmp_path)
    _run(UV, "pip", "install", "--no-deps", "--python", tmp_path / ".venv", wheel, cwd=tmp_path)
    asked = (UV, "run", "--frozen", *python)
    assert "verl_mux.plugin" in _run(*asked, "--no-sync", "python", "-c", ask, cwd=tmp_path).stdout
    _run(UV, "sync", "--frozen", *python, cwd=tmp_path)  # as the examples begin
    assert _run(*asked, "python", "-c", ask, cwd=tmp_path).stdout == "[]\n"
    _run(UV, "pip", "install", "--no-deps", "--target", tmp_path / "plugin", wheel, cwd=tmp_path)
    found = _run("env", f"PYTHONPATH={tmp_path / 'plugin'}", *asked, "python", "-c", ask, cwd=tmp_path)
    assert found.stdout == "['verl_mux.plugin']\n"


def test_what_it_brings_is_light(clean):
    installed = Path(
        _run(clean / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=clean).stdout.strip()
    )
    assert sum(path.stat().st_size for path in installed.rglob("*")) < 200 * 2**20
    brought = {
        line.partition("==")[0].lower()
        for line in _run(UV, "pip", "freeze", "--python", clean / "python", cwd=clean).stdout.splitlines()
    }
    assert not brought & {"torch", "ray", "verl", "sglang", "polars", "pandas", "scipy"}


@pytest.mark.parametrize("command", EVERY_COMMAND, ids=" ".join)
def test_every_command_helps(clean, tmp_path, command):
    result = _run(clean / "verl-mux", *command, "--help", cwd=tmp_path)
    assert "Usage: verl-mux" in result.stdout and "Traceback" not in result.stdout + result.stderr


@pytest.mark.parametrize(("line", "code", "says"), TRIED, ids=[line.partition(" -")[0] for line, _, _ in TRIED])
def test_every_command_answers(clean, tmp_path, line, code, says):
    result = _run(clean / "verl-mux", *line.format(root=ROOT).split(), cwd=tmp_path, check=False)
    noted = result.stdout + result.stderr
    assert result.returncode == code and says in noted and "Traceback" not in noted, noted


def test_every_command_is_tried():
    assert {line.partition(" ")[0] for line, _, _ in TRIED} == {*CHECKOUT_COMMANDS, *COMMANDS}


def test_a_job_without_a_coordinator_gets_its_leases(clean, tmp_path):
    job = "from verl_mux.coordinator.bus.client import connect\nprint(connect(None, 'a', {}).acquire('rollout', step=1).phase)"
    assert _run(clean / "python", "-c", job, cwd=tmp_path).stdout == "rollout\n"
