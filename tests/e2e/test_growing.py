"""A real job grows onto a node that another one asks for again and again. Two hundred times, and whether any response changes:
growing.py.
"""

from __future__ import annotations

import pytest

from tests.e2e import growing, tiny
from verl_mux.profiling.eventlog import events

pytestmark = pytest.mark.e2e

STEPS, REQUESTS = 6, 20


@pytest.fixture(scope="module")
def grown(assets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("growing")
    waited = growing.disturbed(folder, growing.keys_of(assets, STEPS), REQUESTS)
    return folder / "grows", waited


def _named(directory, name, role="trainer"):
    return [event for event in tiny.events(directory, "grows", role) if event["event"] == name]


def test_every_step_is_trained_and_the_node_comes_back_each_time_it_is_asked_for(grown):
    directory, waited = grown
    assert [event["step"] for event in _named(directory, events.STEP)] == list(range(1, STEPS + 1))
    assert waited and sorted(waited)[len(waited) // 2] < growing.SLOW_S


def test_engines_that_join_have_the_weights_of_the_step_and_take_requests_over(grown):
    directory, _ = grown
    used = _named(directory, events.GROWTH)
    assert {event["step"] for event in used} >= set(range(2, STEPS + 1))
    assert any(event["extra"]["requests"] for event in used), "some left with requests"
    # Of which every token is by the step's weights: the trainer refuses others.
    assert _named(directory, events.REQUEST_MIGRATED, "rollout")


def test_no_node_is_held_twice_at_a_time(grown):
    directory, _ = grown
    mine = [event for event in _named(directory, events.PHASE) if event["extra"]["nodes"] == ["r1"]]
    spans = sorted((tiny.ended(event) - event["duration_sec"], tiny.ended(event)) for event in mine)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    assert all(event["extra"]["nodes"] != ["r0", "r1"] for event in _named(directory, events.PHASE) if event["step"])
