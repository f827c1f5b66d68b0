"""The CPU as verl's device: when it is taken and when it leaves verl and SGLang alone, the stand-ins for kernels, and verl's
platform."""

import importlib
import importlib.util
import os
import sys

import pytest
import torch

pytest.importorskip("verl")
from verl.plugin.platform.platform_manager import PlatformRegistry

from verl_mux.platform import choose
from verl_mux_cpu import kernel_placeholders, plugin
from verl_mux_cpu.verl_cpu import CpuPlatform, register


@pytest.mark.parametrize("wanted", [True, False])
def test_the_kernel_placeholders_come_with_the_cpu_platform_alone(monkeypatch, wanted):
    calls = []
    monkeypatch.setattr(kernel_placeholders, "install", lambda: calls.append(1))
    monkeypatch.setattr(choose, "_DEVICE_FILES", ("/no/such/device",))
    monkeypatch.setattr(sys, "argv", ["launch_server"])
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    if wanted:
        monkeypatch.setenv("VERL_PLATFORM", "cpu")
    plugin.activate()
    assert calls == [1] * wanted


def test_where_it_is_not_wanted_nothing_is_set_or_registered(monkeypatch):
    monkeypatch.setattr(choose, "_DEVICE_FILES", ("/no/such/device",))
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    meta_path = list(sys.meta_path)
    importlib.reload(plugin)
    assert "VERL_PLATFORM" not in os.environ and sys.meta_path == meta_path


def test_without_the_package_a_part_is_refused_with_the_way_to_it(monkeypatch):
    monkeypatch.setattr(choose, "_cpu_parts", dict)
    assert choose.cpu_package_missing()
    with pytest.raises(choose.UserError, match="verl-mux-cpu is not installed: `pip install ./verl_mux_cpu`"):
        choose.cpu_part("saver")


@pytest.fixture
def installed(monkeypatch):
    """Stand-ins for `sgl_kernel` during one test."""
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "sgl_kernel"}
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if f is not kernel_placeholders._finder])
    kernel_placeholders.install()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "sgl_kernel"]:
        del sys.modules[name]
    sys.modules.update(before)


def test_names_and_submodules_of_any_depth_can_be_imported(installed):
    import sgl_kernel
    from sgl_kernel import fp8_scaled_mm  # noqa: F401
    from sgl_kernel.flash_attn.hopper import flash_attn_varlen_func  # noqa: F401

    assert sgl_kernel.speculative.tree_kernel is not None
    assert importlib.util.find_spec("sgl_kernel") is not None


def test_what_sglang_can_do_without_is_not_there_though_it_is_installed(installed, monkeypatch):
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    with pytest.raises(ImportError, match="flashinfer needs a GPU"):
        importlib.import_module("flashinfer.fused_moe")


def test_calling_a_kernel_says_which_one_and_that_there_is_no_gpu(installed):
    from sgl_kernel import rmsnorm

    with pytest.raises(RuntimeError, match=r"sgl_kernel\.rmsnorm is a CUDA kernel and there is no GPU here"):
        rmsnorm(1, 2)
    with pytest.raises(RuntimeError, match=r"sgl_kernel\.ops\.fused\.add is a CUDA kernel"):
        importlib.import_module("sgl_kernel").ops.fused.add(eps=1e-6)


def test_protocols_of_python_are_not_pretended(installed):
    module = importlib.import_module("sgl_kernel")
    for name in ("__version__", "__all__", "__wrapped__", "__array__"):
        assert not hasattr(module, name) and not hasattr(module.kernel, name)


@pytest.fixture
def platform() -> CpuPlatform:
    return CpuPlatform()


def test_it_is_never_taken_by_verls_own_probing(platform):
    assert platform.is_available() and not platform.is_platform_available(use_smi_check=True)
    assert torch.ones(2).to(platform.current_device()).device.type == "cpu"


def test_its_device_module_knows_memory_and_random_state(platform):
    device = platform.device_module
    free, total = device.mem_get_info()
    assert 0 < free <= total and 0 < device.memory_allocated() < total
    assert device.max_memory_reserved() > 0 and device.empty_cache() is None
    device.manual_seed(3)
    state = device.get_rng_state()
    first = torch.rand(4)
    device.set_rng_state(state)
    assert torch.rand(4).equal(first)
    assert device.is_available() and device.device_count() >= 1


def test_registering_twice_is_registering_once(monkeypatch):
    monkeypatch.setattr(PlatformRegistry, "_platforms", dict(PlatformRegistry._platforms))
    register()
    register()
    assert PlatformRegistry.get("cpu") is CpuPlatform
    assert set(PlatformRegistry.registered_names()) >= {"nvidia", "cpu"}
