"""The whole table against what it must mean: which tags are awake before, which afterwards, and nothing in between. And the
saver on CUDA, whatever other processes do on its device."""

import contextlib
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import combinations_with_replacement, product

import pytest

from verl_mux.memory.tags import LEVELS, Metered, Moved, NoRoom, SleepState, SleepStates, total

GB = 10**9
BOTH = {"weights", "kv_cache"}
AWAKE_TAGS = {
    SleepState.ACTIVE: BOTH,
    SleepState.KV_RELEASED: {"weights"},
    SleepState.ASLEEP_1: set(),
    SleepState.ASLEEP_2: set(),
}
REQUESTS = [["weights"], ["kv_cache"], ["weights", "kv_cache"], ["kv_cache", "weights"]]
EVERY = list(product(AWAKE_TAGS, ("sleep", "wake"), REQUESTS, LEVELS))


def wanted(state: SleepState, verb: str, tags: list[str]) -> set[str]:
    awake = AWAKE_TAGS[state]
    return awake - set(tags) if verb == "sleep" else awake | set(tags)


@pytest.mark.parametrize(("state", "verb", "tags", "level"), EVERY)
def test_a_step_moves_just_the_tags_that_differ_or_is_refused(state, verb, tags, level):
    states = SleepStates(state)
    target = wanted(state, verb, tags)
    if target not in AWAKE_TAGS.values():  # the KV cache without the weights
        with pytest.raises(ValueError, match=f"cannot {verb} .* while the engine is {state.value}"):
            states.plan(verb, tags, level)
    else:
        steps = states.plan(verb, tags, level)
        after = steps[-1][1] if steps else state
        assert AWAKE_TAGS[after] == target
        assert {tag for tag, _ in steps} == AWAKE_TAGS[state] ^ target
    assert states.state is state


@pytest.mark.parametrize("level", LEVELS)
def test_weights_wake_first_and_sleep_last_at_the_level_that_is_asked(level):
    down = SleepStates(SleepState.ACTIVE).plan("sleep", ["weights", "kv_cache"], level)
    assert down == [("kv_cache", SleepState.KV_RELEASED), ("weights", LEVELS[level])]
    up = SleepStates(LEVELS[level]).plan("wake", ["kv_cache", "weights"])
    assert up == [("weights", SleepState.KV_RELEASED), ("kv_cache", SleepState.ACTIVE)]


@pytest.mark.parametrize(("state", "verb", "tags", "level"), EVERY)
def test_what_was_done_is_not_done_twice(state, verb, tags, level):
    states = SleepStates(state)
    try:
        steps = states.plan(verb, tags, level)
    except ValueError:
        return
    for _, after in steps:
        states.state = after
    assert states.plan(verb, tags, level) == []


@pytest.mark.parametrize("state", list(LEVELS.values()))
def test_a_sleeping_engine_stays_at_its_level(state):
    states = SleepStates(state)
    assert [states.plan("sleep", sorted(BOTH), level) for level in LEVELS] == [[], []]
    assert LEVELS[states.level] is state


@pytest.mark.parametrize("verb", ["sleep", "wake"])
@pytest.mark.parametrize("tags", [[], ["weights", "graphs"], ["everything"]])
def test_unknown_tags_are_refused(verb, tags):
    for state in AWAKE_TAGS:
        with pytest.raises(ValueError, match="tags are"):
            SleepStates(state).plan(verb, tags)


@pytest.mark.parametrize(("verb", "tags"), list(product(("sleep", "wake"), REQUESTS)))
def test_only_a_restart_leaves_failed(verb, tags):
    states = SleepStates()
    states.state = SleepState.FAILED
    with pytest.raises(ValueError, match="failed"):
        states.plan(verb, tags)


ACTOR = {"params": Moved(10, 10, 1.0), "optimizer": Moved(20, 20, 2.0)}
REFERENCE = {"params": Moved(5, 7, 3.0)}


def test_bytes_add_up_and_the_slowest_of_those_that_move_together_counts():
    assert total([ACTOR, REFERENCE]) == {"params": Moved(15, 17, 3.0), "optimizer": Moved(20, 20, 2.0)}
    assert total([ACTOR, REFERENCE], seconds=sum)["params"] == Moved(15, 17, 4.0)


# ---------------------------------------------------------------- the saver on CUDA, on a device that others use too

# Before its launch gate a neighbour takes, without a lease: contexts of its rollout worker and its scheduler, and NCCL.
NEIGHBOUR = (GB // 2, 1.6 * GB, GB)
SIZES = {"weights": 8 * GB, "kv_cache": 40 * GB, "cuda_graph": GB // 2}


class Gpu:
    """torch.cuda and torch_memory_saver's library of one process on a GPU. `others`: what other processes take (below 0: give) at
    each moment of it. `by_process`: whether the driver counts by process. `stay`: bytes of a tag that a pause leaves there."""

    def __init__(self, others: Sequence[float] = (), by_process: bool = False, stay: int = 0):
        self.others, self.by_process, self.stay = iter(others), by_process, stay
        self.free, self.reserved, self.held = 80 * GB, 0, GB
        self.tags, self.tag, self.moments = dict.fromkeys(SIZES, 0), "", 0

    def moment(self):
        self.moments += 1
        self.free -= next(self.others, 0)

    def take(self, size: int, reserved: bool = True):
        """In the open region; if not `reserved`, by a library for itself."""
        self.moment()
        self.free -= size
        self.held += size
        self.reserved += size * reserved
        self.tags[self.tag] += size * reserved

    @contextlib.contextmanager
    def region(self, tag, enable_cpu_backup=False):
        self.moment()
        self.tag = tag
        yield

    @contextlib.contextmanager
    def cuda_graph(self, tag, **capture):
        with self.region(tag):
            yield

    def pause(self, tag):
        self.moment()
        self.free += self.tags[tag] - self.stay
        self.held -= self.tags[tag] - self.stay
        self.moment()

    def resume(self, tag):
        assert self.tags[tag] <= self.free, "torch_memory_saver ends the process"
        self.take(self.tags[tag], reserved=False)

    def synchronize(self):
        self.moment()

    ipc_collect = empty_cache = synchronize

    def mem_get_info(self):
        self.moment()
        return self.free, 80 * GB

    def memory_reserved(self):
        return self.reserved

    def list_gpu_processes(self):
        line = f"process {os.getpid():>10d} uses {self.held / 2**20:>12.3f} MB GPU memory"
        return f"GPU:0\n{line}" if self.by_process else "GPU:0\nno processes are running"


def started(gpu: Gpu, sizes=SIZES, meter=Metered) -> tuple[Metered, dict[str, int]]:
    """An engine that has loaded its weights and captured its graphs, as SGLang does; and what it has on the device, by tag."""
    reported: dict[str, int] = {}
    saver = meter(gpu, gpu, reported.__setitem__)
    with saver.region("weights"):
        for _ in range(2):
            gpu.take(sizes["weights"] // 2)
        gpu.take(20 << 20, reserved=False)  # modules of kernels that the first call loads
    with saver.region("kv_cache"):
        gpu.take(sizes["kv_cache"])
    with saver.cuda_graph(tag="cuda_graph", pool=None):
        gpu.take(sizes["cuda_graph"])
    return saver, reported


def asleep(saver: Metered, reported: dict[str, int]) -> list[dict[str, int]]:
    """What it had, and has."""
    awake = dict(reported)
    for tag in ("kv_cache", "weights", "cuda_graph"):
        saver.pause(tag)
    return [awake, reported]


@pytest.fixture(autouse=True)
def looks(monkeypatch) -> list[float]:
    """Seconds between two looks, which nothing waits."""
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    return waits


def interleavings(moments: int) -> Iterator[list[float]]:
    """A neighbour that starts too: what it takes at each moment, in every way in which its steps fall among these."""
    for at in combinations_with_replacement(range(moments), len(NEIGHBOUR)):
        others = [0.0] * moments
        for moment, size in zip(at, NEIGHBOUR, strict=True):
            others[moment] += size
        yield others


def test_a_neighbour_that_starts_at_any_moment_of_a_start_changes_no_tag_and_ends_no_job():
    asleep(*started(alone := Gpu()))
    nothing = dict.fromkeys(SIZES, 0)
    for others in interleavings(alone.moments):
        assert asleep(*started(Gpu(others))) == [SIZES, nothing], others


class OfTheDevice(Metered):
    """As it was: a tag has what the whole device lost in its regions, and what did not become free of that stayed."""

    @contextlib.contextmanager
    def _sized(self, tag):
        before = self._free()
        yield
        self._sizes[tag] = self._sizes.get(tag, 0) + max(0, before - self._free())
        self._report(tag, self._sizes[tag])

    def pause(self, tag):
        before = self._free()
        self._inner.pause(tag)
        self._report(tag, max(0, self._sizes[tag] - max(0, self._free() - before)))


def died(order: list[float], meter) -> bool:
    """Its server ended a job where more than a 20th of a tag stayed."""
    awake, left = asleep(*started(Gpu(order), meter=meter))
    return any(left[tag] > 0.05 * awake[tag] for tag in ("weights", "kv_cache"))


def test_of_two_jobs_that_start_in_a_thousand_random_orders_none_dies():
    asleep(*started(alone := Gpu()))
    orders = random.Random(0).sample(list(interleavings(alone.moments)), 1000)
    assert [sum(died(order, meter) for order in orders) for meter in (Metered, OfTheDevice)] == [0, 710]


def test_a_device_whose_free_memory_others_move_at_every_moment_ends_no_job():
    rng = random.Random(0)
    for _ in range(1000):
        gpu = Gpu([rng.choice((-1, 1)) * rng.random() * 2 * GB for _ in range(200)], by_process=rng.random() < 0.5)
        assert asleep(*started(gpu)) == [SIZES, dict.fromkeys(SIZES, 0)]


def test_a_tag_that_stayed_by_the_drivers_count_of_this_process_is_no_sleep_and_with_none_it_is_a_warning(looks, caplog):
    for by_process in (True, False):
        saver, reported = started(gpu := Gpu(by_process=by_process))
        gpu.stay = 3 * GB
        with (
            pytest.raises(RuntimeError, match=r"^3.00 of its 40.00 GB did not leave the device") if by_process else nullcontext()
        ):
            saver.pause("kv_cache")
        assert reported["kv_cache"] == pytest.approx(3 * GB if by_process else 0) and sum(looks) == pytest.approx(1.0)
        looks.clear()
    assert [it.getMessage() for it in caplog.records] == [
        "kv_cache sleeps, but 3.00 of its 40.00 GB are not free: another process has taken them, or they stayed"
    ]


def test_what_others_had_for_a_moment_is_waited_for(looks, caplog):
    saver, _ = started(gpu := Gpu())
    gpu.others = iter([0, 0, 0, 30 * GB, 0, 0, -30 * GB])  # from within the pause on
    saver.pause("kv_cache")
    assert 0 < len(looks) < 5 and not caplog.records


def test_edges_of_pages_and_what_libraries_take_for_themselves_may_stay_of_a_small_model(looks):
    sizes = {"weights": 22 << 20, "kv_cache": 100 << 20, "cuda_graph": 2 << 20}
    saver, reported = started(gpu := Gpu(by_process=True), sizes)
    gpu.stay = 2 << 20
    assert asleep(saver, reported) == [sizes, dict.fromkeys(SIZES, 0)] and not looks


def test_a_wake_for_which_others_left_no_room_is_refused_for_graphs_too():
    saver, reported = started(gpu := Gpu())
    asleep(saver, reported)
    free, gpu.free = gpu.free, SIZES["cuda_graph"] - 1
    with pytest.raises(NoRoom, match=r"cuda_graph needs 0.50 GB, 0.50 are free"):
        saver.resume("cuda_graph")
    gpu.free = free
    for tag in SIZES:
        saver.resume(tag)
    assert reported == SIZES
