"""The CPU saver beside a model of it."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from tests.exploring import examples
from verl_mux_cpu.cpu_saver import CpuMemorySaver


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
            with pytest.raises(ValueError):
                self.saver.pause(tag)
            return
        self.saver.pause(tag)
        self.paused[tag] = True

    @rule(tag=st.sampled_from("ab"))
    def resume(self, tag):
        if not self.paused[tag]:
            with pytest.raises(ValueError):
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
