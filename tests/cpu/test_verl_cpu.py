import pytest
import torch

pytest.importorskip("verl")
from verl.plugin.platform.platform_manager import PlatformRegistry

from verl_mux_cpu.verl_cpu import CpuPlatform, register


@pytest.fixture
def platform() -> CpuPlatform:
    return CpuPlatform()


def test_it_is_never_taken_by_verls_own_probing(platform):
    assert platform.is_available() and not platform.is_platform_available(use_smi_check=True)


def test_tensors_stay_where_they_are_when_sent_to_the_current_device(platform):
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


def test_ray_counts_its_devices_as_gpus_and_processes_speak_gloo(platform):
    assert (platform.ray_resource_name(), platform.communication_backend_name(), platform.device_name) == ("GPU", "gloo", "cpu")


def test_servers_get_the_variables_that_their_engine_needs(platform, monkeypatch):
    monkeypatch.setattr(CpuPlatform, "engine_environment", {})
    assert platform.rollout_env_vars() == {}
    CpuPlatform.engine_environment["AN_ENGINES_OWN"] = "1"
    assert platform.rollout_env_vars() == {"AN_ENGINES_OWN": "1"}


def test_registering_twice_is_registering_once(monkeypatch):
    monkeypatch.setattr(PlatformRegistry, "_platforms", dict(PlatformRegistry._platforms))
    register()
    register()
    assert PlatformRegistry.get("cpu") is CpuPlatform
    assert set(PlatformRegistry.registered_names()) >= {"nvidia", "cpu"}
