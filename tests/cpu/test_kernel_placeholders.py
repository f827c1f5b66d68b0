import importlib
import importlib.util
import sys

import pytest

from verl_mux_cpu import kernel_placeholders


@pytest.fixture
def installed(monkeypatch):
    """`sgl_kernel` answered by placeholders for one test."""
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


def test_other_packages_are_found_as_ever(installed):
    assert importlib.util.find_spec("sgl_kernel_of_somebody_else") is None
    assert importlib.import_module("json").loads("1") == 1


def test_installing_twice_is_installing_once(installed):
    kernel_placeholders.install()
    assert sys.meta_path.count(kernel_placeholders._finder) == 1
