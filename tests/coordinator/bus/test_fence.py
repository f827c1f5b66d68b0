"""Only calls of the newest lease pass, and none while it may not be used."""

import pytest

from verl_mux.coordinator.bus.fence import Fence, Fenced


def refused(call, *arguments):
    with pytest.raises(Fenced):
        call(*arguments)
    return True


def test_a_fence_is_shut_until_a_lease_begins_and_refuses_older_ones():
    fence = Fence()
    assert refused(fence.check)
    fence.enter(3)
    fence.enter(3)
    fence.check()
    fence.check(3)
    fence.enter(5)
    with pytest.raises(Fenced, match="refused under token 3: the newest lease here is that of token 5, which is open"):
        fence.enter(3)
    assert refused(fence.check, 3)
    fence.check(5)


def test_a_fenced_lease_is_refused_until_it_is_opened_again_or_the_next_begins():
    fence = Fence()
    fence.enter(3)
    fence.shut()
    assert refused(fence.enter, 3) and refused(fence.check) and refused(fence.reopen, 2)
    fence.reopen(3)
    fence.enter(3)
    fence.shut()
    fence.enter(4)
    fence.check(4)
