"""SGLang calls our entry point in every process that imports it: most of them are not ours."""

import os
import sys
from multiprocessing import forkserver
from types import ModuleType, SimpleNamespace

import pytest

from verl_mux.rollout.engine.sglang import plugin as sglang_plugin

SAVER = "sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.create"
_UPDATES = "sglang.srt.managers.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin"
# The gate of the launch and what free memory is there, and sleep and wake.
MEMORY = [
    (f"{_UPDATES}.release_memory_occupation", "around"),
    (f"{_UPDATES}.resume_memory_occupation", "around"),
    ("sglang.srt.model_executor.model_runner.ModelRunner.initialize", "around"),
    ("sglang.srt.utils.common.get_available_gpu_memory", "around"),
    ("sglang.srt.model_executor.model_runner.ModelRunner.init_lora_manager", "around"),
    ("sglang.srt.managers.tp_worker.BaseTpWorker.load_lora_adapter_from_tensors", "around"),
]


@pytest.fixture
def hooks(monkeypatch) -> list[tuple[str, str]]:
    """(target, kind) of what is registered with a stand-in of SGLang's registry."""
    registered = []
    module = ModuleType("sglang.srt.plugins.hook_registry")
    module.HookRegistry = SimpleNamespace(register=lambda target, hook, kind: registered.append((target, kind)))
    module.HookType = SimpleNamespace(AROUND="around", BEFORE="before", AFTER="after", REPLACE="replace")
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in (sglang_plugin.ENGINE_MARK, sglang_plugin.SEEDED_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return registered


@pytest.mark.parametrize("mark", [None, "", "0", "true"])
def test_in_an_engine_that_is_not_ours_nothing_is_hooked(hooks, monkeypatch, mark):
    monkeypatch.setattr(sglang_plugin.multiprocessing, "parent_process", object)
    if mark is not None:
        monkeypatch.setenv(sglang_plugin.ENGINE_MARK, mark)
    monkeypatch.setenv(sglang_plugin.SEEDED_VARIABLE, "1")
    sglang_plugin.register()
    assert hooks == []


SAMPLER = [
    ("sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", "after"),
    ("sglang.srt.layers.sampler.sampling_from_probs_torch", "replace"),
]


@pytest.mark.parametrize(
    ("child", "seeded", "more"), [(False, True, []), (True, False, MEMORY), (True, True, [*MEMORY, *SAMPLER])]
)  # fmt: skip
def test_our_server_hooks_the_saver_its_schedulers_the_rest_and_the_sampler_on_request(hooks, monkeypatch, child, seeded, more):
    monkeypatch.setattr(sglang_plugin.multiprocessing, "parent_process", lambda: object() if child else None)
    monkeypatch.setenv(sglang_plugin.ENGINE_MARK, "1")
    monkeypatch.setenv(sglang_plugin.SEEDED_VARIABLE, str(int(seeded)))
    # Another library's `forkserver` is not the one that forks engine processes.
    monkeypatch.setattr(forkserver._forkserver, "_forkserver_pid", os.getpid())
    monkeypatch.setattr(forkserver._forkserver, "_forkserver_address", "/tmp/another")
    sglang_plugin.register()
    assert hooks == [(SAVER, "around"), *more]
