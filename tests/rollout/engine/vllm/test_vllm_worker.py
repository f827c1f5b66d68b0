"""One rank of vLLM's under our class: what moves, what is refused, and when; vLLM's own worker beneath it stands in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from verl_mux.platform.charges import BUDGET_VARIABLE, DEVICE_VARIABLE, JOB_VARIABLE
from verl_mux.rollout.engine.server_directory import CHARGES_VARIABLE, DIRECTORY_VARIABLE, mapped_bytes, open_gate, word_left
from verl_mux.rollout.engine.vllm import vllm_worker
from verl_mux.rollout.engine.vllm.vllm_worker import FIRST_DEVICE_VARIABLE, CumemSaver, TaggedWorker
from verl_mux_cpu import cpu_engine, device_ledger
from verl_mux_cpu.cpu_saver import CpuMemorySaver

NUMBERS = 1 << 18  # of the model, and of its cache
BYTES = 4 * NUMBERS


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(NUMBERS))
        self.register_buffer("angles", torch.arange(NUMBERS).float())


class Stock:
    """vLLM's worker of a platform."""

    def __init__(self) -> None:
        self.parallel_config = SimpleNamespace(data_parallel_rank_local=1, data_parallel_index=1, world_size=2)
        self.local_rank = self.rank = 1
        self.order: list[str] = []
        self.fails: dict[str, Exception] = {}

    def _do(self, what: str) -> None:
        self.order.append(what)
        if error := self.fails.get(what):
            raise error

    def init_device(self) -> None:
        self._do("init_device")

    def load_model(self) -> None:
        self._do("load_model")
        with self._maybe_get_memory_pool_context("weights"):
            adapters = SimpleNamespace(_adapter_manager=SimpleNamespace(_last_mapping="of the last batch"))
            self.model_runner = SimpleNamespace(
                model=Model(), post_kv_cache_wake_up=lambda: self._do("post wake"), lora_config=None, lora_manager=adapters
            )

    def determine_available_memory(self) -> int:
        self._do("profile")
        return BYTES

    def initialize_from_config(self) -> None:
        with self._maybe_get_memory_pool_context("kv_cache"):
            self.cache = torch.zeros(NUMBERS)

    def compile_or_warm_up_model(self) -> None:
        self._do("warm up")

    def execute_dummy_batch(self) -> None:
        self._do("dummy")


class Rank(TaggedWorker, Stock):
    def __init__(self) -> None:
        super().__init__()
        self._saver = cpu_engine.SavingAdapter(self._report)

    def launch(self) -> Rank:
        self.init_device()
        self.load_model()
        self.determine_available_memory()
        self.initialize_from_config()
        self.compile_or_warm_up_model()
        return self


@pytest.fixture
def rank(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_engine, "cpu_memory_saver", CpuMemorySaver(device_ledger.hold, device_ledger.reserve))
    for name in ("_tags", "_charges"):
        monkeypatch.setattr(device_ledger, name, {})
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "server"))
    monkeypatch.setenv(device_ledger.DIRECTORY_VARIABLE, str(tmp_path / "devices"))
    monkeypatch.setenv(DEVICE_VARIABLE, "0")
    monkeypatch.setenv(FIRST_DEVICE_VARIABLE, "4")
    (tmp_path / "server").mkdir()
    open_gate(tmp_path / "server")
    it = Rank()
    it.mapped = lambda: {tag for tag, held in mapped_bytes(tmp_path / "server").items() if held}
    return it


def error(answer: dict) -> str | None:
    assert not answer["failed"]
    return answer["error"]


def test_the_gate_is_before_all_that_looks_at_the_device(rank, monkeypatch):
    monkeypatch.setattr(vllm_worker, "wait_at_gate", lambda: rank.order.append("gate"))
    monkeypatch.setattr(vllm_worker, "charge_engine", lambda late: rank.order.append(f"charge late={late}"))
    rank.launch()
    assert rank.order == ["gate", "charge late=False", "init_device", "load_model", "profile", "warm up", "charge late=True"]
    # The second tensor parallel rank of the second data parallel one, on a server that begins at device 4.
    assert device_ledger._device() == 7


@pytest.mark.parametrize("what", ["init_device", "load_model", "profile", "warm up"])
def test_what_ends_a_launch_is_said(rank, what, tmp_path):
    rank.fails[what] = KeyError("lm_head")
    with pytest.raises(KeyError):
        rank.launch()
    assert word_left(tmp_path / "server") == "KeyError: 'lm_head'"


def test_an_engine_without_room_at_its_start_says_who_holds_what(rank, monkeypatch, tmp_path):
    monkeypatch.setenv(BUDGET_VARIABLE, "1000000000")
    monkeypatch.setenv(JOB_VARIABLE, "math")
    monkeypatch.setenv(CHARGES_VARIABLE, '{"context": 900000000, "graphs": 200000000}')
    with pytest.raises(device_ledger.DeviceFull):
        rank.launch()
    assert word_left(tmp_path / "server").startswith("out of memory on this node: 0.20 GB are needed")


@pytest.mark.parametrize("level", [1, 2])
def test_a_tag_that_moved_does_not_move_again_and_buffers_come_back(rank, level):
    rank.launch()
    model = rank.model_runner.model
    weight, angles = model.weight.detach().clone(), model.angles.clone()
    for _ in range(2):
        for tag in ("kv_cache", "weights"):
            assert error(rank.mux_move("sleep", tag, level, 0.0)) is None
    assert rank.mapped() == set()
    for _ in range(2):
        assert error(rank.mux_move("wake", "weights", level, 0.0)) is None
    assert rank.mapped() == {"weights"} and model.angles.equal(angles) and model.weight.equal(weight) is (level == 1)
    if level == 2:
        assert error(rank.mux_move("wake", "kv_cache", level, 0.0)) == (
            "after a sleep without a copy no sync has brought back weight"
        )
        assert rank.mapped() == {"weights"}
        model.weight.data.copy_(weight)
    assert error(rank.mux_move("wake", "kv_cache", level, 0.0)) is None and rank.mapped() == {"weights", "kv_cache"}
    assert rank.order[-1] == "post wake"


def test_where_there_is_no_room_nothing_is_mapped_and_it_may_be_tried_again(rank, monkeypatch):
    rank.launch()
    rank.mux_move("sleep", "kv_cache", 2, 0.0)
    monkeypatch.setenv(BUDGET_VARIABLE, str(2 * BYTES + 100))
    said = error(rank.mux_move("wake", "kv_cache", 2, 0.0))
    assert said.startswith("no room to wake: kv_cache take 0.00 GB") and rank.mapped() == {"weights"}
    monkeypatch.setenv(BUDGET_VARIABLE, str(4 * BYTES))
    assert error(rank.mux_move("wake", "kv_cache", 2, 0.0)) is None


def test_what_fails_half_way_is_an_answer(rank, monkeypatch):
    rank.launch()
    monkeypatch.setattr(rank._saver, "pause", lambda tag: 1 / 0)
    assert rank.mux_move("sleep", "weights", 2, 0.0) == {"error": "sleep of weights failed: division by zero", "failed": True}


def test_vllms_own_sleep_and_wake_move_the_tags_too(rank):
    rank.launch()
    rank.sleep(level=1)
    assert rank.mapped() == set()
    rank.execute_dummy_batch()
    rank.wake_up(["weights"])
    assert rank.mapped() == {"weights"} and "dummy" not in rank.order
    rank.wake_up()
    rank.execute_dummy_batch()
    assert rank.mapped() == {"weights", "kv_cache"} and rank.order[-1] == "dummy"
    rank.sleep(level=2)
    with pytest.raises(RuntimeError, match="no sync has brought back weight"):
        rank.wake_up()


def test_a_rank_takes_what_lies_at_its_own_worker_out_of_a_batch_and_nothing_out_of_an_empty_one(rank, monkeypatch):
    asked, found = [], [("a", 1)]
    rank.model_runner = SimpleNamespace(model="model")
    monkeypatch.setattr(vllm_worker, "tensors", lambda body, at, model: asked.append((body, at, model)) or iter(found))
    rank._update_weights = lambda weights, peft_config, base_sync_done: asked.append((weights, peft_config, base_sync_done))
    rank.mux_load("body")
    assert asked == [("body", 3, "model"), ([("a", 1)], None, False)]
    found.clear()
    rank.mux_load("body")
    assert asked[2:] == [("body", 3, "model")]
    found.append(("a", 1))
    asked.clear()
    rank.remove_lora = lambda number: asked.append(number)
    rank.mux_load("body", {"r": 4})
    assert asked == [123, ("body", 3, "model"), ([("a", 1)], {"r": 4}, True)], "the last adapter goes first"


@pytest.mark.parametrize("serves", [True, False])
def test_which_requests_use_the_adapter_is_said_again_after_a_sleep(rank, serves):
    rank.launch()
    rank.model_runner.lora_config = serves
    rank.sleep(level=1)
    rank.wake_up()
    assert (rank.model_runner.lora_manager._adapter_manager._last_mapping is None) is serves


# ---------------------------------------------------------------- CUDA: vLLM's allocator and its driver calls stand in


@pytest.fixture
def cuda(monkeypatch):
    data = [
        SimpleNamespace(handle=(0, size, at, at), tag=tag)
        for size, at, tag in ((5, 1, "weights"), (7, 2, "weights"), (100, 3, "kv_cache"))
    ]
    state = SimpleNamespace(calls=[], free=1000, reports=[])
    allocator = SimpleNamespace(pointer_to_data=dict(enumerate(data)))
    monkeypatch.setattr(CumemSaver, "_allocator", staticmethod(lambda: allocator))
    monkeypatch.setattr("vllm.device_allocator.cumem.unmap_and_release", lambda it: state.calls.append(("unmap", it[2])))
    monkeypatch.setattr("vllm.device_allocator.cumem.create_and_map", lambda it: state.calls.append(("map", it[2])))
    for name, function in {
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda: (state.free, 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    state.saver = CumemSaver(lambda tag, mapped: state.reports.append((tag, mapped)))
    return state


def test_a_tag_moves_by_itself_whatever_other_jobs_do_to_the_free_memory(cuda):
    cuda.saver.pause("weights")
    cuda.free = 20  # another job has taken the rest meanwhile
    cuda.saver.resume("weights")
    assert cuda.calls == [("unmap", 1), ("unmap", 2), ("map", 1), ("map", 2)]
    assert cuda.reports == [("weights", 0), ("weights", 12)]


def test_what_has_no_room_is_not_mapped(cuda):
    cuda.saver.pause("kv_cache")
    cuda.free = 99
    with pytest.raises(vllm_worker.NoRoom):
        cuda.saver.resume("kv_cache")
    assert cuda.saver.is_paused("kv_cache") and cuda.calls == [("unmap", 3)]
