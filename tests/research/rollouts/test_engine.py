"""Virtual replicas: time, slots, and requests that move at random without losing or gaining a token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from research.rollouts.bed import Bed
from research.rollouts.engine import NEVER, Replica, Request
from tests.exploring import examples

BED = Bed(batch=4, slots=2, step_s=1.0, request_s=0.5, prefill_s=0.1, train_token_s=0.0, switch_s=3.0)


def run(replica: Replica) -> list[tuple[float, str]]:
    out = []
    while (now := replica.next_end()) < NEVER:
        out += [(now, request.key[1]) for request in replica.advance(now)]
    return out


def test_requests_decode_in_step_and_what_does_not_fit_waits():
    replica = Replica(BED)
    for name, tokens in (("a", 2), ("b", 4), ("c", 2)):
        replica.submit(Request(("j", name, 0), kept=0, more=tokens))
    # Two at once take 2 s a token; c starts when a has ended, with b's last two.
    assert run(replica) == [(4.0, "a"), (8.0, "b"), (8.0, "c")]


def test_higher_priorities_leave_the_queue_first_and_tokens_are_read_again():
    replica = Replica(BED)
    for name, priority in (("a", 0), ("b", 0), ("c", 1), ("d", 2)):
        replica.submit(Request(("j", name, 0), kept=10, more=1, read=10, priority=priority))
    ended = run(replica)
    assert [name for _, name in ended][2:] == ["d", "c"] or {name for _, name in ended[2:]} == {"c", "d"}
    assert ended[0][0] == pytest.approx(2 * 10 * 0.1 + 2.0)


def test_a_replica_that_changes_hands_stands_still_until_it_is_ready():
    replica = Replica(BED, ready=3.0)
    replica.submit(Request(("j", "a", 0), kept=0, more=1))
    assert replica.next_end() == pytest.approx(4.5)


@settings(max_examples=examples(60))
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=8), st.lists(st.tuples(st.floats(0, 3), st.integers(0, 7)), max_size=200)
)
def test_requests_that_are_moved_at_any_moment_keep_their_tokens(lengths, moves):
    replicas = [Replica(BED), Replica(BED)]
    requests = {("j", str(at), 0): Request(("j", str(at), 0), kept=0, more=more) for at, more in enumerate(lengths)}
    for at, request in enumerate(requests.values()):
        replicas[at % 2].submit(request)
    ended: list = []
    known = dict.fromkeys(requests, 0)
    now = 0.0

    def advance(until: float) -> None:
        nonlocal now
        now = until
        ended.extend(request.key for replica in replicas for request in replica.advance(until))
        for key, tokens in ((k, t) for replica in replicas for k, t in replica.tokens().items()):
            assert known[key] <= tokens <= requests[key].more, "tokens are neither lost nor made up"
            known[key] = tokens

    for wait, which in moves:
        advance(min(now + wait, *(replica.next_end() for replica in replicas)))
        for source, target in (replicas, replicas[::-1]):
            keys = source.held()
            if which < len(keys):
                total = source.abort(keys[which])
                target.submit(requests[keys[which]]._replace(read=total), done=total)
                break
    while (until := min(replica.next_end() for replica in replicas)) < NEVER:
        advance(until)
    assert sorted(ended) == sorted(requests)
