"""The CPU saver against real memory: what the system says is resident, and what the tensors hold; and beside a model of it."""

import gc
import mmap

import hypothesis.strategies as st
import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from tests.exploring import examples
from verl_mux_cpu import cpu_saver
from verl_mux_cpu.cpu_saver import CpuMemorySaver

MIB = 1 << 20
ELEMENTS = 16 * MIB // 4


@pytest.fixture
def saver() -> CpuMemorySaver:
    return CpuMemorySaver()


def resident() -> int:
    return psutil.Process().memory_info().rss


def tracked(saver: CpuMemorySaver, tag: str, count: int = 3 * mmap.PAGESIZE, backup: bool = True) -> torch.Tensor:
    tensor = torch.arange(count, dtype=torch.float32)
    saver.track(tag, [tensor], enable_cpu_backup=backup)
    return tensor


class TestPausedMemoryIsReallyGivenBack:
    def test_resident_bytes_fall_by_the_paused_tag_and_return_when_it_is_written_again(self, saver):
        with saver.region("weights"):
            weights = torch.ones(ELEMENTS)
        with saver.region("kv_cache"):
            cache = torch.ones(2 * ELEMENTS)
        both = resident()
        assert saver.pause("kv_cache").nbytes == cache.nbytes
        without_cache = resident()
        assert saver.pause("weights").nbytes == weights.nbytes
        without_both = resident()
        saver.resume("weights")
        weights.fill_(1)
        assert both - without_cache == pytest.approx(32 * MIB, abs=MIB)
        assert without_cache - without_both == pytest.approx(16 * MIB, abs=MIB)
        assert resident() - without_both == pytest.approx(16 * MIB, abs=MIB)

    def test_addresses_and_views_stay_as_they_were(self, saver):
        tensor = tracked(saver, "weights")
        view = tensor.view(3, -1)[1]
        before = (tensor.data_ptr(), view.data_ptr(), view.shape, view.stride(), view.storage_offset())
        saver.pause("weights")
        saver.resume("weights")
        assert (tensor.data_ptr(), view.data_ptr(), view.shape, view.stride(), view.storage_offset()) == before
        tensor[mmap.PAGESIZE] = -1
        assert view[0] == -1


ONES = torch.randint(0, 2, (5 * mmap.PAGESIZE,))
KINDS = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


class TestHostCopy:
    @pytest.mark.parametrize("values", [*map(ONES.to, KINDS), torch.tensor([float("nan"), -0.0]).repeat(2 * mmap.PAGESIZE)])
    def test_values_come_back_bit_for_bit(self, saver, values):
        tensor = values.clone()
        saver.track("params", [tensor])
        assert saver.pause("params").mapped == 0
        moved = saver.resume("params")
        assert tensor.view(torch.uint8).equal(values.view(torch.uint8))
        assert moved.nbytes == moved.mapped == saver.mapped_bytes()["params"] == tensor.nbytes and moved.seconds > 0

    def test_without_a_host_copy_the_values_are_gone(self, saver):
        tensor = tracked(saver, "kv_cache", backup=False)
        saver.pause("kv_cache")
        with pytest.raises(ValueError, match="has no host copy"):
            saver.host_copy(tensor)

    @given(
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
        shape=st.lists(st.integers(0, 7), min_size=0, max_size=3),
        offset=st.integers(0, 5),
        data=st.data(),
    )
    @settings(max_examples=examples(60))
    def test_it_has_the_shape_strides_offset_and_values_of_the_paused_view(self, dtype, shape, offset, data):
        saver = CpuMemorySaver()
        stride = [data.draw(st.integers(0, 9)) for _ in shape]
        base = torch.randint(0, 100, (offset + 200 + mmap.PAGESIZE,)).to(dtype)
        view = base.as_strided(shape, stride, offset)
        expected = view.clone()
        saver.track("params", [base])
        saver.pause("params")
        copy = saver.host_copy(view)
        assert (copy.shape, copy.stride(), copy.storage_offset(), copy.dtype) == (
            view.shape, view.stride(), view.storage_offset(), view.dtype,
        )  # fmt: skip
        assert copy.equal(expected)

    def test_a_storage_that_is_no_multiple_of_the_views_items_is_no_obstacle(self, saver):
        raw = torch.arange(2 * mmap.PAGESIZE + 3, dtype=torch.int64).to(torch.uint8)
        view = raw[: 2 * mmap.PAGESIZE].view(torch.float32)
        expected = view.clone()
        saver.track("params", [raw])
        saver.pause("params")
        assert saver.host_copy(view).view(torch.int32).equal(expected.view(torch.int32))

    def test_tied_tensors_share_one_host_copy(self, saver):
        embedding = torch.nn.Embedding(64, 256)
        head = torch.nn.Linear(256, 64, bias=False)
        head.weight = embedding.weight
        saver.track("params", [embedding.weight, head.weight])
        assert saver.pause("params").nbytes == embedding.weight.nbytes
        assert saver.host_copy(head.weight).data_ptr() == saver.host_copy(embedding.weight).data_ptr()

    def test_a_distributed_tensor_is_refused(self, saver, one_rank_mesh):
        from torch.distributed.tensor import distribute_tensor

        tensor = distribute_tensor(torch.ones(8), one_rank_mesh)
        with pytest.raises(ValueError, match="give its local tensor"):
            saver.track("params", [tensor])
        with pytest.raises(ValueError, match="give its local tensor"):
            saver.host_copy(tensor)


class TestRefusals:
    def test_two_storages_on_one_memory_are_refused_and_keep_their_values(self, saver):
        array = np.ones(4 * mmap.PAGESIZE, dtype=np.float32)
        first, second = torch.from_numpy(array), torch.from_numpy(array)
        saver.track("params", [first])
        saver.track("optimizer", [second])
        saver.pause("params")
        with pytest.raises(ValueError, match="same memory"):
            saver.pause("optimizer")
        saver.resume("params")
        assert array.sum() == array.size

    def test_a_pause_that_the_system_refuses_leaves_the_values_in_place(self, saver, monkeypatch):
        tensors = [tracked(saver, "params") for _ in range(3)]
        real, calls = cpu_saver._release_pages, []

        def fails_the_third_time(address, nbytes):
            calls.append(address)
            if len(calls) == 3:
                raise OSError(22, "no")
            real(address, nbytes)

        monkeypatch.setattr(cpu_saver, "_release_pages", fails_the_third_time)
        with pytest.raises(OSError):
            saver.pause("params")
        assert not saver.is_paused("params")
        assert all(t.equal(torch.arange(t.numel(), dtype=torch.float32)) for t in tensors)


class TestWhatBelongsToATag:
    def test_only_storages_made_inside_a_region_join_it(self, saver):
        before = torch.ones(mmap.PAGESIZE)
        with saver.region("weights"):
            made = torch.empty(mmap.PAGESIZE)
            made.copy_(before)
            view = before[1:]
        after = torch.ones(mmap.PAGESIZE)
        assert saver.mapped_bytes() == {"weights": made.nbytes}
        saver.pause("weights")
        assert before.equal(after) and view.equal(after[1:])

    def test_tensors_on_memory_of_python_or_numpy_values_stay_outside(self, saver):
        array = np.ones(4 * mmap.PAGESIZE)
        with saver.region("weights"):
            made = [torch.tensor([1.0, 2.0]), torch.as_tensor(array), torch.from_numpy(array)]
        assert saver.pause("weights").nbytes == 0
        assert made[0].tolist() == [1, 2] and (array == 1).all()

    def test_temporaries_of_a_region_are_forgotten(self, saver):
        with saver.region("weights"):
            kept = torch.ones(1024) + torch.ones(1024) * 2
        assert saver.mapped_bytes() == {"weights": kept.nbytes}
        assert len(saver._tags["weights"].allocations) == 1

    def test_inside_two_regions_a_tensor_belongs_to_the_inner_one(self, saver):
        with saver.region("weights"):
            first = torch.ones(10)
            with saver.region("kv_cache"):
                second = torch.ones(20)
            third = torch.ones(30)
        assert saver.mapped_bytes() == {"weights": first.nbytes + third.nbytes, "kv_cache": second.nbytes}

    def test_a_storage_belongs_to_the_first_tag_that_it_joined(self, saver):
        tensor = tracked(saver, "params")
        saver.track("optimizer", [tensor])
        assert saver.mapped_bytes() == {"params": tensor.nbytes, "optimizer": 0}
        saver.pause("params")
        saver.pause("optimizer")
        saver.resume("params")
        saver.resume("optimizer")
        assert tensor.equal(torch.arange(tensor.numel(), dtype=torch.float32))

    def test_a_tensor_that_joins_a_paused_tag_keeps_its_values_until_the_next_pause(self, saver):
        tracked(saver, "params")
        saver.pause("params")
        late = tracked(saver, "params")
        stranger = torch.ones(3)
        assert saver.mapped_bytes() == {"params": late.nbytes}
        assert saver.host_copy(late) is late and saver.host_copy(stranger) is stranger
        saver.resume("params")
        assert late.equal(torch.arange(late.numel(), dtype=torch.float32))


class TestMemoryThatIsNotOurs:
    """Freed, moved, shared and file-backed memory is never touched."""

    def test_the_memory_of_a_dead_tensor_is_left_to_its_next_owner(self, saver):
        memory = bytearray(8 * mmap.PAGESIZE)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        saver.track("weights", [tensor])
        saver.pause("weights")
        del tensor
        gc.collect()
        memory[:] = b"7" * len(memory)
        assert saver.resume("weights").nbytes == 0
        assert saver.pause("weights").nbytes == 0
        assert set(memory) == set(b"7")

    def test_a_storage_freed_in_place_is_left_alone(self, saver, monkeypatch):
        # FSDP frees an unsharded parameter this way: the tensor lives on, its memory has another owner.
        released = []
        monkeypatch.setattr(cpu_saver, "_release_pages", lambda address, nbytes: released.append(address))
        tensor = tracked(saver, "params")
        tensor.untyped_storage().resize_(0)
        assert (saver.pause("params").nbytes, saver.resume("params").nbytes, released) == (0, 0, [])

    def test_a_storage_that_moved_is_paused_where_it_is_now(self, saver):
        tensor = tracked(saver, "params", ELEMENTS, backup=False)
        storage = tensor.untyped_storage()
        storage.resize_(2 * storage.nbytes())
        grown = torch.empty(0).set_(storage)
        grown[ELEMENTS:] = 5
        before = resident()
        assert saver.pause("params").nbytes == 2 * ELEMENTS * 4
        assert before - resident() == pytest.approx(32 * MIB, abs=MIB)

    def test_a_host_copy_takes_the_place_of_the_one_before(self, saver):
        tensor = tracked(saver, "params")
        places = []
        for value in (1.0, 2.0):
            tensor.fill_(value)
            saver.pause("params")
            places.append((copy := saver.host_copy(tensor)).data_ptr())
            assert bool((copy == value).all())
            saver.resume("params")
        assert places[0] == places[1]

    @pytest.mark.parametrize("factor", [0, 0.5, 1, 2])
    def test_a_storage_resized_while_paused_gets_back_what_it_has_room_for(self, saver, factor):
        tensor = tracked(saver, "params", ELEMENTS)
        storage = tensor.untyped_storage()
        saver.pause("params")
        storage.resize_(int(factor * storage.nbytes()))
        saver.resume("params")
        kept = torch.empty(0).set_(storage)[:ELEMENTS]
        assert kept.equal(torch.arange(kept.numel(), dtype=torch.float32))

    def test_shared_memory_stays_mapped_and_counts_as_mapped(self, saver):
        shared = torch.arange(8 * mmap.PAGESIZE).share_memory_()
        saver.track("params", [shared])
        moved = saver.pause("params")
        assert (moved.nbytes, moved.mapped) == (0, shared.nbytes)
        assert saver.mapped_bytes() == {"params": shared.nbytes}
        assert saver.host_copy(shared) is shared
        assert shared.equal(torch.arange(8 * mmap.PAGESIZE))

    def test_a_file_mapping_keeps_what_was_written_over_it(self, saver, tmp_path):
        path = tmp_path / "weights.bin"
        path.write_bytes(bytes(8 * mmap.PAGESIZE))
        mapped = torch.from_file(str(path), shared=False, size=8 * mmap.PAGESIZE, dtype=torch.uint8)
        mapped.fill_(9)
        saver.track("weights", [mapped], enable_cpu_backup=False)
        assert saver.pause("weights").nbytes == 0
        assert mapped.eq(9).all()

    def test_read_only_memory_is_not_written_on_resume(self, saver, tmp_path):
        path = tmp_path / "weights.npy"
        np.save(path, np.arange(8 * mmap.PAGESIZE))
        with pytest.warns(UserWarning, match="not writable"):
            tensor = torch.from_numpy(np.load(path, mmap_mode="r"))
        saver.track("params", [tensor])
        saver.pause("params")
        saver.resume("params")
        assert tensor.equal(torch.arange(8 * mmap.PAGESIZE))

    def test_neighbours_on_the_first_and_last_page_are_left_alone(self, saver):
        whole = np.full(6 * mmap.PAGESIZE, 3, dtype=np.uint8)
        inner = torch.from_numpy(whole[100 : 5 * mmap.PAGESIZE + 100])
        saver.track("kv_cache", [inner], enable_cpu_backup=False)
        saver.pause("kv_cache")
        assert (whole[:100] == 3).all() and (whole[5 * mmap.PAGESIZE + 100 :] == 3).all()

    def test_tensors_of_a_few_bytes_and_of_none_pass_through(self, saver):
        small, empty = torch.arange(3), torch.empty(0)
        saver.track("params", [small, empty])
        assert saver.pause("params").nbytes == small.nbytes
        assert saver.host_copy(small).tolist() == [0, 1, 2]
        assert saver.host_copy(empty).numel() == 0
        saver.resume("params")
        assert small.tolist() == [0, 1, 2]


class AgainstAModel(RuleBasedStateMachine):
    """Any history of region, track, writes, deaths, pause and resume, beside a plain list of expected values."""

    tensors = Bundle("tensors")

    def __init__(self):
        super().__init__()
        self.saver = CpuMemorySaver()
        self.paused = {"a": False, "b": False}
        self.alive: dict[int, tuple[torch.Tensor, str | None, bool, torch.Tensor]] = {}
        self.next = 0

    def _keep(self, tensor, tag, backup):
        self.next += 1
        self.alive[self.next] = (tensor, tag, backup, tensor.clone())
        return self.next

    @rule(target=tensors, tag=st.sampled_from("ab"), backup=st.booleans(), size=st.sampled_from([1, 900, 5000]))
    def make_in_a_region(self, tag, backup, size):
        with self.saver.region(tag, enable_cpu_backup=backup):
            tensor = torch.full((size,), float(self.next))
        return self._keep(tensor, None if self.paused[tag] else tag, backup)

    @rule(target=tensors, size=st.sampled_from([1, 900, 5000]))
    def make_outside(self, size):
        return self._keep(torch.full((size,), float(self.next)), None, True)

    @rule(key=tensors, tag=st.sampled_from("ab"))
    def track(self, key, tag):
        if key in self.alive and not self._gone(key):
            tensor, owner, backup, expected = self.alive[key]
            self.saver.track(tag, [tensor])

    @rule(key=consumes(tensors))
    def die(self, key):
        self.alive.pop(key, None)

    @rule(key=tensors, value=st.floats(-9, 9))
    def write(self, key, value):
        if key in self.alive and not self._gone(key):
            self.alive[key][0].fill_(value)
            self.alive[key][3].fill_(value)

    @rule(tag=st.sampled_from("ab"))
    @precondition(lambda self: not all(self.paused.values()))
    def pause(self, tag):
        if self.paused[tag]:
            with pytest.raises(ValueError, match="is paused already"):
                self.saver.pause(tag)
            return
        self.saver.pause(tag)
        self.paused[tag] = True

    @rule(tag=st.sampled_from("ab"))
    def resume(self, tag):
        if not self.paused[tag]:
            with pytest.raises(ValueError, match="is active already"):
                self.saver.resume(tag)
            return
        lost = [k for k in self.alive if self._gone(k) and self._allocation(k)[0] == tag and not self._allocation(k)[1].backup]
        self.saver.resume(tag)
        self.paused[tag] = False
        for key in lost:  # contents are undefined now: whatever they are is what must stay
            self.alive[key][3].copy_(self.alive[key][0])

    def _allocation(self, key):
        cdata = self.alive[key][0].untyped_storage()._cdata
        return next(((t, e.allocations[cdata]) for t, e in self.saver._tags.items() if cdata in e.allocations), (None, None))

    def _gone(self, key) -> bool:
        allocation = self._allocation(key)[1]
        return allocation is not None and allocation.given_back > 0

    @invariant()
    def every_tensor_that_is_there_has_its_values_and_every_host_copy_too(self):
        for key, (tensor, _, _, expected) in self.alive.items():
            allocation = self._allocation(key)[1]
            if not self._gone(key):
                assert tensor.equal(expected)
            elif allocation.backup:
                assert self.saver.host_copy(tensor).equal(expected)

    @invariant()
    def a_paused_tag_holds_nothing_that_was_there_when_it_was_paused(self):
        held = self.saver.mapped_bytes()
        for tag in held:
            there = [k for k in self.alive if self._allocation(k)[0] == tag and not self._gone(k)]
            assert held[tag] == sum(self.alive[k][0].nbytes for k in there)


AgainstAModel.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=30)
TestAnyHistory = AgainstAModel.TestCase
