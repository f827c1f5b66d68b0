"""SGLang's adapter interface over the CPU saver: what the server reads after each sleep and wake."""

import os
from types import SimpleNamespace

import pytest
import torch

from verl_mux.memory.metered import Metered
from verl_mux.memory.tag_report import DIRECTORY_VARIABLE, mapped_bytes
from verl_mux.rollout.engine.sglang import memory_saver as sglang_adapter
from verl_mux_cpu import cpu_engine
from verl_mux_cpu.cpu_saver import CpuMemorySaver

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU adapter is for machines without CUDA")


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(sglang_adapter, "_mapped", {})
    monkeypatch.setattr(cpu_engine, "cpu_memory_saver", CpuMemorySaver())
    return tmp_path


def test_the_report_follows_what_is_mapped(directory):
    adapter = cpu_engine.SavingAdapter(sglang_adapter._report)
    with adapter.region("weights"):
        weights = torch.ones(4096)
    with adapter.region("kv_cache"):
        first = torch.ones(4096)
    with adapter.region("kv_cache"):
        second = torch.ones(4096)
    both = {"weights": weights.nbytes, "kv_cache": first.nbytes + second.nbytes}
    assert mapped_bytes(directory) == both
    adapter.pause("kv_cache")
    assert mapped_bytes(directory) == {**both, "kv_cache": 0}
    adapter.pause("weights")
    assert mapped_bytes(directory) == {"weights": 0, "kv_cache": 0}
    adapter.resume("weights")
    adapter.resume("kv_cache")
    assert mapped_bytes(directory) == both and [path.name for path in directory.iterdir()] == [f"{os.getpid()}.json"]


def test_memory_that_cannot_be_given_back_is_reported_as_mapped(directory):
    adapter = cpu_engine.SavingAdapter(sglang_adapter._report)
    shared = torch.ones(4096).share_memory_()
    cpu_engine.cpu_memory_saver.track("weights", [shared])
    adapter.pause("weights")
    assert mapped_bytes(directory) == {"weights": shared.nbytes}


def test_an_engine_without_memory_saver_keeps_sglangs_own_adapter():
    own = object()
    assert sglang_adapter.create_adapter(lambda enable: own, False) is own
    assert sglang_adapter.create_adapter(lambda enable: own, enable=False) is own


@needs_no_gpu
def test_without_cuda_the_adapter_is_ours_and_sglangs_is_not_made():
    def original(enable):
        raise AssertionError("torch_memory_saver needs libcuda")

    assert isinstance(sglang_adapter.create_adapter(original, enable=True), cpu_engine.SavingAdapter)
    assert isinstance(sglang_adapter.create_adapter(original, True), cpu_engine.SavingAdapter)


def test_all_of_a_process_on_cuda_is_one_meter_around_sglangs_adapter(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sglang_adapter, "_cuda", None)
    made = [sglang_adapter.create_adapter(lambda enable: object(), enable=True) for _ in range(2)]
    assert isinstance(made[0], Metered) and made[0] is made[1]


def test_on_cuda_memory_that_others_let_go_counts_as_free_before_a_wake_is_refused(monkeypatch):
    calls = []
    for name in ("synchronize", "ipc_collect", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: calls.append(name))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 if "empty_cache" in calls else 40, 200))
    inner = SimpleNamespace(pause=lambda tag: None, resume=lambda tag: calls.append("resumed"))
    saver = Metered(inner, sglang_adapter.CudaDevice(), lambda tag, mapped: None)
    saver._whole["weights"], saver._paused = 60, {"weights"}
    saver.resume("weights")
    assert calls == ["ipc_collect", "empty_cache", "resumed"]
    saver.pause("weights")
    assert calls[3:] == ["synchronize"]


def test_it_has_every_method_of_sglangs_adapter():
    names = {"check_validity", "configure_subprocess", "region", "cuda_graph", "disable", "pause", "resume", "enabled"}
    assert names <= set(dir(cpu_engine.SavingAdapter))
