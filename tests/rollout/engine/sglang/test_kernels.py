"""flashinfer is asked for the kernels of a model before the launch gate; what it is asked is what it takes."""

import inspect
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")
from flashinfer import jit
from flashinfer.jit import sampling
from sglang.srt.layers.attention import flashinfer_backend

from verl_mux.rollout.engine.sglang import scheduler_memory
from verl_mux.rollout.engine.sglang.kernels import compile_kernels


@pytest.fixture
def asked(monkeypatch):
    """Of flashinfer, in order; and the gate."""
    calls = []
    for module, name in ((jit, "gen_batch_prefill_module"), (jit, "gen_batch_decode_module"), (sampling, "gen_sampling_module")):
        takes = inspect.signature(getattr(module, name))
        monkeypatch.setattr(module, name, lambda *given, takes=takes, name=name: (name, takes.bind(*given).arguments))
    monkeypatch.setattr(jit, "build_jit_specs", calls.extend)
    monkeypatch.setattr("flashinfer.utils.determine_attention_backend", lambda *_: "fa3")
    monkeypatch.setattr(scheduler_memory, "wait_at_gate", lambda: calls.append("gate"))
    monkeypatch.setattr(scheduler_memory, "measure", lambda _: 1.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return calls


def runner(heads: int = 28, **arguments):
    model = SimpleNamespace(
        dtype=torch.bfloat16, num_attention_heads=heads, head_dim=128, v_head_dim=128, sliding_window_size=None,
        get_num_kv_heads=lambda ranks: 4 // ranks,
    )  # fmt: skip
    given = SimpleNamespace(**{"attention_backend": "flashinfer", "kv_cache_dtype": "auto", **arguments})
    return SimpleNamespace(server_args=given, model_config=model, tp_size=2, gpu_id=0, device="cuda")


def test_kernels_are_there_when_an_engine_asks_for_its_lease(asked):
    scheduler_memory.initialize(lambda *_: asked.append("loads"), runner(), 0.0)
    (one, first), (two, second), (three, _), *rest = asked
    assert (one, first["backend"], two, second["backend"]) == (
        "gen_batch_prefill_module",
        "fa2",
        "gen_batch_prefill_module",
        "fa3",
    )
    assert (first["dtype_q"], first["head_dim_vo"], first["use_fp16_qk_reduction"]) == (torch.bfloat16, 128, False)
    assert three == "gen_sampling_module" and rest == ["gate", "loads"]


def test_few_queries_a_head_have_a_kernel_of_their_own_and_other_backends_none(asked):
    assert not flashinfer_backend.should_use_tensor_core(torch.bfloat16, 4, 2)
    compile_kernels(runner(heads=8))
    assert [name for name, _ in asked][2:] == ["gen_batch_decode_module", "gen_sampling_module"]
    asked.clear()
    compile_kernels(runner(attention_backend="fa3"))
    assert asked == []


def test_an_engine_whose_kernels_do_not_compile_here_goes_on_and_says_so(asked, monkeypatch, caplog):
    monkeypatch.setattr(jit, "build_jit_specs", lambda specs: 1 / 0)
    compile_kernels(runner())
    assert "kernels could not be compiled before the launch gate" in caplog.text
