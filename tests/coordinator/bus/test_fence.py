"""Only calls of the newest lease pass, and none while it may not be used."""

import pytest

from verl_mux.coordinator.bus.fence import Fence, Fenced


def refused(call, *arguments):
    with pytest.raises(Fenced):
        call(*arguments)
    return True


def test_a_fence_is_shut_until_a_lease_begins():
    fence = Fence()
    assert refused(fence.check)
    fence.enter(3)
    fence.enter(3)
    fence.check()
    fence.check(3)


def test_a_call_of_an_older_lease_is_refused():
    fence = Fence()
    fence.enter(3)
    fence.enter(5)
    assert refused(fence.enter, 3) and refused(fence.check, 3)
    fence.check(5)


def test_a_fenced_lease_is_refused_until_it_is_opened_again():
    fence = Fence()
    fence.enter(3)
    fence.shut()
    assert refused(fence.enter, 3) and refused(fence.check) and refused(fence.reopen, 2)
    fence.reopen(3)
    fence.enter(3)


def test_the_next_lease_opens_what_the_last_one_shut():
    fence = Fence()
    fence.enter(3)
    fence.shut()
    fence.enter(4)
    with pytest.raises(Fenced, match="refused under token 3: the newest lease here is that of token 4, which is open"):
        fence.enter(3)
