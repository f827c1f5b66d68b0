"""Being installed beside verl changes nothing for those who do not ask for us, and costs them next to nothing."""

import json
from pathlib import Path

import pytest

from verl_mux.config.job_checks import MODES

ROOT = Path(__file__).parents[1]
STOCK = ["actor_rollout_ref.rollout.name=sglang", "trainer.v1.trainer_mode=sync"]


def probe(python, plugins: str) -> dict:
    variables = {"VERL_PLATFORM": None, "VERL_USE_EXTERNAL_PLUGINS": plugins, "VERL_USE_EXTERNAL_MODULES": None}
    result = python("-m", "tests.plugin_probe", *STOCK, cwd=ROOT, timeout=300, **variables)
    assert result.returncode == 0, result.stderr[-2000:]
    return {**json.loads(result.stdout.splitlines()[-1]), "stderr": result.stderr}


@pytest.fixture(scope="module")
def with_us(python) -> dict:
    return probe(python, "auto")


@pytest.fixture(scope="module")
def without_us(python) -> dict:
    return probe(python, "none")


def test_importing_the_package_imports_nothing_heavy(python):
    code = "import sys, verl_mux; print(*sys.modules)"
    modules = set(python("-c", code).stdout.split())
    assert "verl_mux" in modules
    assert not modules & {"torch", "ray", "numpy", "verl", "sglang", "zmq", "hydra", "omegaconf", "pandas"}


def test_the_command_line_answers_without_torch(python):
    result = python("-X", "importtime", "-m", "verl_mux", "--help")
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time:")}
    assert "doctor" in result.stdout and result.returncode == 0
    assert "typer" in imported and not imported & {"torch", "ray", "verl", "zmq", "polars", "matplotlib"}


def test_import_verl_loads_only_the_hooks_of_ours(with_us, without_us):
    ours = set(with_us["after_verl"]) - set(without_us["after_verl"])
    assert "verl_mux.plugin" in ours
    hooks = {"plugin", "post_import", "errors", "platform", "platform.choose", "config", "config.validation_hook"}
    ours = {name for name in ours if name.partition(".")[0] != "wrapt"}
    assert ours <= {"verl_mux", *(f"verl_mux.{hook}" for hook in hooks), "verl_mux_cpu", "verl_mux_cpu.plugin"}


def test_our_modes_and_our_checkpoint_engine_are_known(with_us, without_us):
    assert set(with_us["modes"]) - set(without_us["modes"]) == set(MODES)
    assert set(with_us["checkpoint_engines"]) - set(without_us["checkpoint_engines"]) == {"mux"}


@pytest.mark.parametrize("registry", ["modes", "checkpoint_engines", "platforms", "engines"])
def test_what_verl_registers_itself_is_untouched(with_us, without_us, registry):
    stock = without_us[registry]
    assert stock and {name: with_us[registry].get(name) for name in stock} == stock


@pytest.mark.parametrize("what", ["platform", "platforms", "engines", "variables"])
def test_stock_keys_get_verls_own_platform_and_environment(with_us, without_us, what):
    if what == "variables":
        assert set(with_us[what]) - set(without_us[what]) == set()
    else:
        assert with_us[what] == without_us[what]


def test_stock_keys_do_not_load_sglang_or_stand_in_for_its_kernels(with_us, without_us):
    assert set(with_us["sglang"]) <= set(without_us["sglang"])
    assert with_us["sgl_kernel_finders"] == 0


def test_nothing_is_complained_about(with_us):
    assert "verl_mux" not in with_us["stderr"] and "Traceback" not in with_us["stderr"]
