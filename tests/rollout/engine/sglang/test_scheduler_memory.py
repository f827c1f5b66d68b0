"""SGLang's own release and resume under our hooks: the calls that end a stock scheduler are an answer, or nothing."""

import contextlib
import os
import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput
from sglang.srt.managers.scheduler_update_weights_mixin import SchedulerUpdateWeightsMixin

from verl_mux.memory.tags import Metered
from verl_mux.rollout.engine import server_directory
from verl_mux.rollout.engine.server_directory import DIRECTORY_VARIABLE, mapped_bytes, open_gate, word_left
from verl_mux.rollout.engine.sglang import scheduler_memory
from verl_mux.rollout.engine.sglang.scheduler_memory import REPORT, Ask, release, resume
from verl_mux_cpu import cpu_engine, device_ledger
from verl_mux_cpu.cpu_saver import CpuMemorySaver

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU adapter is for machines without CUDA")
TAGS = ("weights", "kv_cache", "cuda_graph")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """SGLang's release waits for its ranks; here there is one."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Engine:
    """A scheduler with a model and a KV cache of our CPU saver's. `busy`: a request runs."""

    def __init__(self, group, saver):
        self.adapter = cpu_engine.SavingAdapter(scheduler_memory._report)
        with self.adapter.region("weights"):
            self.model = torch.nn.Linear(64, 64)
            self.model.register_buffer("table", torch.ones(32))
        with self.adapter.region("kv_cache"):
            self.cache = torch.zeros(4096)
        self.saver, self.busy, self.flushed = saver, False, 0
        self.scheduler = SimpleNamespace(
            offload_tags=set(), memory_saver_adapter=self.adapter, tp_cpu_group=group, flush_cache=self._flush,
            server_args=SimpleNamespace(enable_weights_cpu_backup=False), is_fully_idle=lambda: not self.busy,
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=self.model)),
        )  # fmt: skip

    def _flush(self):
        self.flushed += 1
        return True

    def sleep(self, *tags, level=2):
        return self._ask(
            release, SchedulerUpdateWeightsMixin.release_memory_occupation, ReleaseMemoryOccupationReqInput, tags, level
        )

    def wake(self, *tags):
        return self._ask(resume, SchedulerUpdateWeightsMixin.resume_memory_occupation, ResumeMemoryOccupationReqInput, tags, 2)

    def _ask(self, hook, original, kind, tags, level):
        request = kind(tags=list(tags) or None)
        setattr(request, REPORT, Ask(level))
        return getattr(hook(original, self.scheduler, request), REPORT)

    def mapped(self):
        return {tag for tag, held in self.saver.mapped_bytes().items() if held}

    def sync(self):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.data.copy_(torch.full_like(parameter, 0.5))


@pytest.fixture
def engine(one_rank, monkeypatch, tmp_path):
    monkeypatch.setenv(device_ledger.DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.delenv(device_ledger.BUDGET_VARIABLE, raising=False)
    for name in ("_tags", "_charges"):
        monkeypatch.setattr(device_ledger, name, {})
    saver = CpuMemorySaver(device_ledger.hold, device_ledger.reserve)
    monkeypatch.setattr(cpu_engine, "cpu_memory_saver", saver)
    for name in ("_mapped", "_sizes"):
        monkeypatch.setattr(scheduler_memory, name, {})
    return Engine(one_rank, saver)


def test_level_1_comes_back_as_it_was(engine):
    before = engine.model.weight.clone()
    assert engine.sleep(level=1).error is None and engine.mapped() == set()
    assert engine.wake().error is None and torch.equal(engine.model.weight, before)
    assert torch.equal(engine.model.table, torch.ones(32))


def test_level_2_wakes_its_cache_only_after_a_sync(engine):
    engine.sleep(level=2)
    assert engine.wake("weights").error is None
    refused = engine.wake("kv_cache")
    assert "no sync has brought back weight, bias" in refused.error and not refused.failed
    assert engine.mapped() == {"weights"}
    engine.sync()
    assert engine.wake("kv_cache").error is None and engine.mapped() == {"weights", "kv_cache"}


def test_a_busy_engine_says_so_and_keeps_its_memory(engine):
    engine.busy = True
    answer = engine.sleep()
    assert answer.busy and "requests run" in answer.error and engine.mapped() == {"weights", "kv_cache"}


def test_what_ends_a_stock_scheduler_is_nothing(engine):
    assert engine.wake("kv_cache").error is None  # a tag that was never released
    engine.sleep(level=1)
    assert engine.sleep().error is None  # released twice, or a POST that came again
    assert "after the weights" in engine.wake("kv_cache").error
    engine.wake()
    assert engine.wake().error is None  # resumed twice
    assert "there is no tag 'all'" in engine.wake("all").error and "there is no tag 'all'" in engine.sleep("all").error


def test_a_wake_without_room_maps_nothing_and_names_who_holds_what(engine, monkeypatch):
    engine.sleep(level=1)
    before = engine.saver.mapped_bytes()
    monkeypatch.setenv(device_ledger.BUDGET_VARIABLE, "100")
    answer = engine.wake()
    assert "no room to wake: cuda_graph and weights and kv_cache take" in answer.error and "held by no process" in answer.error
    assert engine.saver.mapped_bytes() == before
    monkeypatch.setenv(device_ledger.BUDGET_VARIABLE, "1000000")
    assert engine.wake().error is None


def test_room_that_goes_while_it_wakes_takes_back_what_was_mapped(engine, monkeypatch):
    weights = engine.model.weight.clone()
    engine.sleep(level=1)
    size = scheduler_memory._sizes["weights"] + scheduler_memory._sizes["kv_cache"] // 2
    monkeypatch.setattr(scheduler_memory, "_no_room", lambda *_: None)  # it was there a moment ago
    monkeypatch.setenv(device_ledger.BUDGET_VARIABLE, str(size))
    answer = engine.wake()
    assert "out of memory" in answer.error and not answer.failed and engine.mapped() == set()
    monkeypatch.delenv(device_ledger.BUDGET_VARIABLE)
    assert engine.wake().error is None and torch.equal(engine.model.weight, weights)
    assert torch.equal(engine.model.table, torch.ones(32))


class Ranks:
    """This rank and another one: what is true on both. `other`: what that one says to the next questions, then yes."""

    def __init__(self, *other):
        self.other, self.said = list(other), []

    def __call__(self, scheduler, true_here):
        self.said.append(true_here)
        there = self.other.pop(0) if self.other else True
        return true_here and there


@pytest.mark.parametrize(("awake", "tag"), [(set(), "weights"), ({"weights"}, "kv_cache")])
def test_a_rank_whose_room_goes_while_it_wakes_says_so_to_the_others(engine, monkeypatch, awake, tag):
    engine.sleep(level=1)
    for other in awake:
        engine.wake(other)
    ranks = Ranks()
    monkeypatch.setattr(scheduler_memory, "_everywhere", ranks)
    monkeypatch.setattr(scheduler_memory, "_no_room", lambda *_: None)
    monkeypatch.setenv(device_ledger.BUDGET_VARIABLE, "100")
    answer = engine.wake(tag)
    assert "out of memory" in answer.error and not answer.failed
    assert (ranks.said, engine.mapped()) == ([False], awake)


@pytest.mark.parametrize("tags", [("weights",), ("weights", "kv_cache")])
def test_a_rank_waits_for_no_other_whose_room_went_while_it_woke(engine, monkeypatch, tags):
    engine.sleep(level=1)
    monkeypatch.setattr(scheduler_memory, "_no_room", lambda *_: None)
    monkeypatch.setattr(scheduler_memory, "_everywhere", Ranks(*[True] * (len(tags) - 1), False))
    if len(tags) == 1:
        monkeypatch.setattr(dist, "barrier", lambda group: pytest.fail("the other rank does not come"))
    answer = engine.wake(*tags)
    assert (answer.error, answer.failed, engine.mapped()) == (f"another rank has no room for {tags[-1]}", False, set())


def test_a_sleep_is_answered_when_every_rank_has_given_its_memory_back(engine, monkeypatch):
    mapped = []
    monkeypatch.setattr(scheduler_memory, "_everywhere", lambda scheduler, done: mapped.append(engine.mapped()) or done)
    assert engine.sleep(level=1).error is None and mapped == [set()]


def test_a_rank_that_could_not_give_its_memory_back_is_told_by_all(engine, monkeypatch):
    monkeypatch.setattr(scheduler_memory, "_everywhere", Ranks(False))
    answer = engine.sleep(level=1)
    assert answer.failed and answer.error.startswith("another rank could not give cuda_graph, weights, kv_cache back")


def test_five_hundred_random_sequences_leave_the_engine_alive(engine, monkeypatch):
    rng, seen = random.Random(0), set()
    monkeypatch.setattr(scheduler_memory.log, "exception", lambda *_: pytest.fail("something was raised inside"))
    for _ in range(500):
        for _ in range(rng.randrange(1, 8)):
            tags = rng.sample(TAGS, rng.randrange(0, 4))
            action = rng.choice(("sleep", "sleep", "wake", "wake", "sync", "busy", "room", "again"))
            if action == "busy":
                engine.busy = rng.random() < 0.3
            elif action == "room":
                size = rng.choice((None, 0, 20_000, 10**9))
                monkeypatch.setenv(device_ledger.BUDGET_VARIABLE, str(size)) if size is not None else monkeypatch.delenv(
                    device_ledger.BUDGET_VARIABLE, raising=False
                )
            elif action == "sync" and "weights" not in engine.scheduler.offload_tags:
                engine.sync()
            elif action in ("sleep", "again"):
                for _ in range(1 + (action == "again")):
                    answer = engine.sleep(*tags, level=rng.choice((1, 2)))
                assert not answer.failed
                seen.add(("sleep", answer.error is None))
            elif action == "wake":
                before = engine.mapped()
                answer = engine.wake(*tags)
                assert not answer.failed and (answer.error is None or engine.mapped() == before)
                seen.add(("wake", answer.error is None))
            paused = {tag for tag in TAGS if engine.saver.is_paused(tag)}
            assert paused == engine.scheduler.offload_tags
    assert seen == {("sleep", True), ("sleep", False), ("wake", True), ("wake", False)}
    monkeypatch.delenv(device_ledger.BUDGET_VARIABLE, raising=False)
    engine.busy = False
    assert engine.wake("weights").error is None
    engine.sync()
    assert engine.wake().error is None and engine.mapped() == {"weights", "kv_cache"}


def test_free_memory_is_measured_behind_the_gate_where_the_others_sleep(engine, monkeypatch):
    order, runner = [], SimpleNamespace(gpu_id=1, device="cpu")
    monkeypatch.setenv(device_ledger.DEVICE_VARIABLE, "0")
    monkeypatch.setenv(server_directory.CHARGES_VARIABLE, '{"context": 7, "graphs": 5}')
    monkeypatch.setattr(server_directory, "charge", lambda kinds: order.append(sorted(kinds)))
    monkeypatch.setattr(scheduler_memory, "wait_at_gate", lambda: order.append("gate"))
    monkeypatch.setattr(scheduler_memory, "measure", lambda it: order.append("measured") or 12.5)
    scheduler_memory.initialize(lambda it, free: order.append((it, free)), runner, 3.0)
    assert order == [["context"], "gate", "measured", (runner, 12.5), ["context", "graphs"]]
    assert device_ledger._device() == 1


def test_an_engine_without_room_at_its_start_leaves_word_who_holds_what(engine, monkeypatch, tmp_path):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setenv(device_ledger.BUDGET_VARIABLE, "1000000000")
    monkeypatch.setenv(device_ledger.JOB_VARIABLE, "math")
    monkeypatch.setenv(server_directory.CHARGES_VARIABLE, '{"context": 900000000, "graphs": 200000000}')
    monkeypatch.setattr(scheduler_memory, "measure", lambda runner: 0.0)
    open_gate(tmp_path)
    with pytest.raises(device_ledger.DeviceFull):
        scheduler_memory.initialize(lambda runner, free: None, SimpleNamespace(gpu_id=0), 0.0)
    said = word_left(tmp_path)
    assert said.startswith("out of memory on this node: 0.20 GB are needed, 0.10 of 1.00 GB are free; held by math (pid")


def test_what_else_ends_an_engine_at_its_start_is_told_with_its_kind(engine, monkeypatch, tmp_path):
    def load(runner, free):
        raise KeyError("lm_head")

    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(scheduler_memory, "measure", lambda runner: 0.0)
    open_gate(tmp_path)
    with pytest.raises(KeyError):
        scheduler_memory.initialize(load, SimpleNamespace(gpu_id=0), 0.0)
    assert word_left(tmp_path) == "KeyError: 'lm_head'"


def test_sglangs_question_for_free_memory_is_answered_by_the_budget(engine, monkeypatch):
    asked = []

    def own(device, gpu_id, **keys):
        asked.append(device)
        return 99.0

    assert scheduler_memory.available_memory(own, "cpu", 0) == 99.0
    monkeypatch.setenv(device_ledger.BUDGET_VARIABLE, str(3 * 2**30))
    assert scheduler_memory.available_memory(own, "cuda", 0) == 99.0
    held = engine.saver.mapped_bytes()
    free = scheduler_memory.available_memory(own, "cpu", 0, distributed=True, cpu_group=engine.scheduler.tp_cpu_group)
    assert free == pytest.approx(3 - sum(held.values()) / 2**30) and asked == ["cpu", "cuda"]


# ---------------------------------------------------------------- the saver


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(scheduler_memory, "_mapped", {})
    monkeypatch.setattr(cpu_engine, "cpu_memory_saver", CpuMemorySaver())
    return tmp_path


def test_the_report_follows_what_is_mapped(directory):
    adapter = cpu_engine.SavingAdapter(scheduler_memory._report)
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


@pytest.mark.parametrize("call", [lambda original, on: scheduler_memory.create_adapter(original, on),
                                  lambda original, on: scheduler_memory.create_adapter(original, enable=on)])  # fmt: skip
def test_without_cuda_the_adapter_is_ours_and_without_memory_saver_sglangs_own(call):
    own = object()
    assert call(lambda enable: own, False) is own
    assert isinstance(call(lambda enable: pytest.fail("torch_memory_saver needs libcuda"), True), cpu_engine.SavingAdapter)


def test_all_of_a_process_on_cuda_is_one_meter_around_sglangs_adapter(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(scheduler_memory, "_cuda", None)
    made = [scheduler_memory.create_adapter(lambda enable: object(), enable=True) for _ in range(2)]
    assert isinstance(made[0], Metered) and made[0] is made[1]


def test_on_cuda_memory_that_others_let_go_counts_as_free_before_a_wake_is_refused(monkeypatch):
    calls = []
    for name in ("synchronize", "ipc_collect", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: calls.append(name))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 if "empty_cache" in calls else 40, 200))
    inner = SimpleNamespace(pause=lambda tag: None, resume=lambda tag: calls.append("resumed"))
    saver = Metered(inner, torch.cuda, lambda tag, mapped: None)
    saver._sizes["weights"], saver._paused = 60, {"weights"}
    saver.resume("weights")
    assert calls == ["ipc_collect", "empty_cache", "resumed"]
    saver.pause("weights")
    assert calls[3:] == ["synchronize"]


def test_a_wake_asks_for_the_room_of_what_was_captured_too(engine, monkeypatch):
    """Of which torch_memory_saver says nothing but the end of the process."""
    captured, asked = SimpleNamespace(cuda_graph=lambda **capture: contextlib.nullcontext()), []
    monkeypatch.setattr(torch.cuda, "memory_reserved", iter([100, 700]).__next__)
    with Metered(captured, torch.cuda, scheduler_memory._report).cuda_graph(tag="cuda_graph", pool=None):
        pass
    engine.sleep(level=1)
    monkeypatch.setattr(scheduler_memory, "refusal", lambda what, needed, *_: asked.append((what, needed)))
    assert engine.wake("weights", "cuda_graph").error is None
    assert asked == [("cuda_graph and weights", 600 + scheduler_memory._sizes["weights"])]
