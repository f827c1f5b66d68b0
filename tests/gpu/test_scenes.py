"""The scenes of the GPU tests without a GPU: engines on a device with a budget pass them, and each finds what it is for."""

import pytest
import torch

pytest.importorskip("sglang")
pytest.importorskip("verl")
from tests.gpu import scenes, states
from tests.gpu.engines import BUDGET, opened
from verl_mux.memory.tags import KV_CACHE
from verl_mux.trainer import workers
from verl_mux_cpu import cpu_saver
from verl_mux_cpu.cpu_saver import CpuMemorySaver

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the bed is for machines without CUDA")


@pytest.fixture(scope="module")
def bed(tmp_path_factory):
    yield from opened("bed", tmp_path_factory.mktemp("bed"))


@pytest.fixture
def engine(bed):
    """Starts one that is ended after the test, so that every test has the whole device."""
    first = len(bed.started)
    yield bed.engine
    for started in bed.started[first:]:
        started.end()


def test_asleep_an_engine_keeps_what_is_charged_and_no_more(bed, engine):
    assert scenes.kept_asleep(bed, engine("good"), bed.limit()) == []
    (wrong,) = scenes.kept_asleep(bed, engine("hoards", 0.3, fault="keeps too much"), bed.limit())
    assert "of hoards keeps" in wrong and wrong.endswith(f"bytes asleep, of {bed.limit()}")


def test_no_process_grows_from_round_to_round(bed, engine):
    assert scenes.growth(bed, engine("steady"), 8) == []
    assert "grew from" in scenes.growth(bed, engine("leaks", 0.3, fault="grows"), 8)[0]


@pytest.fixture
def unseen(bed, monkeypatch):
    """The driver shows no process, only what the device has in use, as NVML in most containers."""
    monkeypatch.setattr(bed, "used", lambda used=bed.by_pid: sum(used().values()))
    monkeypatch.setattr(bed, "by_pid", dict)
    return monkeypatch


def test_where_no_process_is_seen_the_device_shows_what_an_engine_keeps(bed, engine, unseen):
    assert scenes.kept_asleep(bed, engine("good"), bed.limit()) == []
    (wrong,) = scenes.kept_asleep(bed, engine("hoards", 0.3, fault="keeps too much"), bed.limit())
    assert "of rank 0 of hoards keeps" in wrong


def test_and_what_a_dead_jobs_process_holds(bed, unseen):
    assert scenes.killed_in(bed, "rollout") == []
    (wrong,) = scenes.killed_in(bed, "rollout", "unmarked")
    assert "of the dead job holds" in wrong


def test_nothing_passes_where_nothing_is_seen(bed, engine, unseen):
    unseen.setattr(bed, "used", lambda: 0)
    assert "its processes are not seen" in scenes.kept_asleep(bed, engine("a", 0.2), bed.limit())[0]
    assert scenes.growth(bed, engine("b", 0.2), 4) == ["no process of b is seen to hold anything"]
    assert "and the device shows 0" in scenes.killed_in(bed, "rollout")[0]


def test_an_engine_that_starts_beside_another_process_books_none_of_its_memory(bed, engine):
    assert scenes.sized_beside(bed, engine("alone", 0.3), 0.3) == []
    (wrong,) = scenes.sized_beside(bed, engine("again", 0.3), 0.3, fault="books another's")
    assert wrong.startswith("an engine that starts beside another has 1")


def test_a_sync_brings_everything_back_and_the_right_values(bed, engine):
    good = engine("synced")
    assert scenes.filled_by_the_sync(good, good.tokens()) == []
    partly = engine("partly", 0.3, fault="syncs a part")
    assert "no sync has brought back weight" in scenes.filled_by_the_sync(partly, partly.tokens())[0]
    other = engine("other", 0.3, fault="syncs other values")
    assert "a fresh engine" in scenes.filled_by_the_sync(other, other.tokens())[0]


def test_an_engine_that_joins_has_the_cache_that_it_would_have_alone(bed, engine):
    alone = engine("alone")
    size = alone.tags[KV_CACHE]
    assert size > 0.4 * BUDGET
    alone.end()
    assert scenes.as_if_alone(bed, size, bed.limit(), 0.5) == []


def test_one_that_measures_while_another_runs_is_found(tmp_path):
    for bed in opened("bed", tmp_path):
        alone = bed.engine("alone")
        alone.end()
        (wrong,) = scenes.as_if_alone(bed, alone.tags[KV_CACHE], bed.limit(), 0.5, fault="measures too early")
        assert "an engine that joins has a KV cache of" in wrong


def test_a_wake_without_room_is_an_error_and_hurts_nobody(bed, engine):
    sleeper = engine("sleeper", 0.6)
    sleeper.sleep()
    assert scenes.no_room(engine("awake", 0.9), sleeper) == []


def test_one_that_ends_without_room_is_found(bed, engine):
    sleeper = engine("weak", 0.6, fault="dies without room")
    sleeper.sleep()
    (wrong,) = scenes.no_room(engine("strong", 0.9), sleeper)
    assert wrong.startswith("a wake without room ended weak")


@pytest.fixture
def host_is_device(monkeypatch):
    monkeypatch.setattr(workers, "get_device_name", lambda: "cpu")
    saver = CpuMemorySaver()
    for module in (cpu_saver, states):
        monkeypatch.setattr(module, "cpu_memory_saver", saver)


@pytest.mark.parametrize("phase", scenes.PHASES)
def test_a_dead_jobs_node_is_granted_when_no_process_of_it_holds_memory(bed, phase):
    assert scenes.killed_in(bed, phase) == []


def test_a_process_that_still_holds_memory_then_is_found(bed):
    (wrong,) = scenes.killed_in(bed, "rollout", "unmarked")
    assert "of the dead job holds" in wrong


def test_a_host_copy_is_whole_when_a_sleep_returns_and_the_device_is_free(host_is_device):
    assert scenes.copied_when_told(*states.made("critic", "cpu")) == []


def test_a_copy_that_differs_and_bytes_that_stay_are_found(host_is_device):
    asleep, copies, _ = states.made("actor", "cpu")

    class Late:
        def sleep(self):
            asleep.sleep()
            copies()[0].view(-1)[7] += 1

    assert scenes.copied_when_told(Late(), copies, lambda: 100) == [
        "tensor 0 differs on the host",
        "100 of 100 bytes stay on the device",
    ]


@pytest.mark.parametrize(("left", "wrong"), [(0, []), (50, []), (51, ["51 of 100 bytes stay on the device"])])
def test_workspaces_of_libraries_may_stay_but_not_most_of_the_states(left, wrong):
    class Gone:
        def sleep(self):
            held.append(left)

    held = [100]
    assert scenes.copied_when_told(Gone(), list, lambda: held[-1], workspaces=1000) == wrong


def test_other_weights_and_missing_steps_are_found():
    name = "training/rollout_actor_probs_pearson_corr"
    good, bad = {name: 0.999}, {name: 0.2}
    assert scenes.weights_agree([good, {}, good], 2) == []
    assert scenes.weights_agree([good, bad, {name: float("nan")}], 4) == [
        "step 2: correlation 0.200 with the trainer's", "step 3: correlation nan with the trainer's", "3 steps of 4",
    ]  # fmt: skip


def test_two_holders_of_a_node_and_a_job_that_never_had_it_are_found():
    assert scenes.in_turns([("a", 0, 1), ("b", 1, 2), ("a", 2.5, 3)]) == []
    assert scenes.in_turns([("a", 0, 2), ("b", 1.5, 3)]) == ["a and b held the node at 1.5"]
    assert scenes.in_turns([("a", 0, 2)]) == ["only ['a'] held the node"]
