"""Being installed beside verl changes nothing for programs that do not ask for us, and costs them next to nothing. A module of
ours is imported right after verl's: real packages on the path."""

import importlib
import inspect
import json
import sys
from pathlib import Path

import pytest
import wrapt

from verl_mux.config.rollout_checks import MODES
from verl_mux.post_import import after_import

ROOT = Path(__file__).parents[1]
STOCK = ["actor_rollout_ref.rollout.name=sglang", "trainer.v1.trainer_mode=sync"]


@pytest.fixture(scope="module")
def probed(python) -> list[dict]:
    variables = dict.fromkeys(("VERL_PLATFORM", "VERL_USE_EXTERNAL_PLUGINS", "VERL_USE_EXTERNAL_MODULES"))
    result = python("-m", "tests.plugin_probe", *STOCK, cwd=ROOT, timeout=300, **variables)
    assert result.returncode == 0, result.stderr[-2000:]
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    return [{**json.loads(line), "stderr": result.stderr} for line in lines]


@pytest.fixture(scope="module")
def with_us(probed) -> dict:
    return probed[0]


@pytest.fixture(scope="module")
def without_us(probed) -> dict:
    return probed[1]


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
    hooks = {"plugin", "post_import", "errors", "platform", "platform.choose", "config", "config.validation_hook",
             "config.queue_namespace"}  # fmt: skip
    ours = {name for name in ours if name.partition(".")[0] != "wrapt"}
    cpu = {"verl_mux_cpu", "verl_mux_cpu.plugin", "verl_mux_cpu.vllm_metadata"}
    assert ours <= {"verl_mux", *(f"verl_mux.{hook}" for hook in hooks)} | cpu


def test_our_modes_and_our_checkpoint_engine_are_known(with_us, without_us):
    assert set(with_us["modes"]) - set(without_us["modes"]) == set(MODES)
    assert set(with_us["checkpoint_engines"]) - set(without_us["checkpoint_engines"]) == {"mux"}


@pytest.mark.parametrize("registry", ["modes", "checkpoint_engines", "platforms", "engines"])
def test_what_verl_registers_itself_is_untouched(with_us, without_us, registry):
    stock = without_us[registry]
    assert stock and {name: with_us[registry].get(name) for name in stock} == stock


def test_stock_keys_get_verls_own_platform_and_environment(with_us, without_us):
    assert [with_us[what] for what in ("platform", "platforms", "engines")] == [
        without_us[what] for what in ("platform", "platforms", "engines")
    ]
    assert set(with_us["variables"]) <= set(without_us["variables"])
    # SGLang is not loaded, and nothing stands in for its kernels.
    assert set(with_us["sglang"]) <= set(without_us["sglang"]) and with_us["sgl_kernel_finders"] == 0
    assert "verl_mux" not in with_us["stderr"] and "Traceback" not in with_us["stderr"]


# ---------------------------------------------------------------- a module imported after another


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Write a package `upstream` with a module `part` and a module `follower`; each notes its import in `upstream.seen`."""
    package = tmp_path / "upstream"
    package.mkdir()
    (package / "__init__.py").write_text("seen = ['upstream']\n")
    (package / "part.py").write_text("import upstream\nupstream.seen.append('part')\nvalue = 1\n")
    (tmp_path / "follower.py").write_text("import upstream\nfrom upstream.part import value\nupstream.seen.append('follower')\n")
    (tmp_path / "broken.py").write_text("import upstream\nupstream.seen.append('broken')\nraise OSError('no such library')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(wrapt.importer, "_post_import_hooks", {})
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("upstream", "follower", "broken"):
            del sys.modules[name]


@pytest.mark.parametrize("there_already", [False, True])
def test_a_follower_is_imported_after_the_upstream_module_and_not_before(place, there_already):
    if there_already:
        importlib.import_module("upstream.part")
    after_import("upstream.part", "follower")
    assert [name in sys.modules for name in ("upstream", "follower")] == [there_already] * 2
    importlib.import_module("upstream.part")
    assert sys.modules["upstream"].seen == ["upstream", "part", "follower"]


def test_the_upstream_module_is_as_without_a_follower(place):
    plain = importlib.import_module("upstream.part")
    expected = (type(plain.__loader__), type(plain.__spec__.loader), plain.__file__)
    del sys.modules["upstream.part"]
    after_import("upstream.part", "follower")
    followed = importlib.import_module("upstream.part")
    assert (type(followed.__loader__), type(followed.__spec__.loader), followed.__file__) == expected
    assert "value = 1" in inspect.getsource(followed)
    assert importlib.reload(followed) is followed
    assert sys.modules["upstream"].seen.count("follower") == 1


def test_a_follower_that_fails_is_said_and_the_upstream_module_works(place, caplog):
    after_import("upstream.part", "broken")
    assert importlib.import_module("upstream.part").value == 1
    assert "broken could not be loaded" in caplog.text and "no such library" in caplog.text


def test_a_program_run_from_the_module_has_its_code(place, python):
    (place / "run.py").write_text(
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(Path(place))!r})\n"
        "from verl_mux.post_import import after_import\n"
        "after_import('upstream.part', 'follower')\n"
        "print(runpy.run_module('upstream.part')['value'])\n"
    )
    result = python(str(place / "run.py"))
    assert (result.stdout, result.returncode) == ("1\n", 0), result.stderr
