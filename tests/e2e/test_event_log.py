"""The table of events, what our code writes, and what a real job's log holds: that of the job with rollout control."""

from __future__ import annotations

import pytest

from tests.e2e import tiny
from tests.profiling.eventlog.occurring import TABLE, keys_by_event, missing, undocumented
from verl_mux.profiling.eventlog import events

pytestmark = pytest.mark.e2e

# What such a job does not log, beside the events of a coordinator and an agent.
LACKS = {
    events.TOOL_EXECUTION,  # its agent loop calls none
    *(events.REQUEST_MIGRATED, events.MIGRATION, events.GROWTH),  # all nodes of its rollouts are its own
    events.REQUEST_PADDED,  # no prompt group is given up
    events.SAMPLE_WAIT,  # not one of verl's own streaming modes
    *(events.REF, events.VALUES, events.UPDATE_CRITIC),
    events.LEASE_FENCED,  # no coordinator fell silent
    events.ENGINE_RETRACT,  # SGLang's scheduler fails when it prefills a thrown out request without a GPU
    events.ENGINE_STALLED,
    *(events.LOG_DROPPED, events.LOG_COST),
    *(f"{events.ENGINE_GENERATE}.drafted_tokens", f"{events.ENGINE_GENERATE}.accepted_tokens"),  # no speculative decoding
    events.DRAWN_AGAIN,  # algorithm.filter_groups is off
    f"{events.REQUEST_ABORTED}.error",  # no request fails
    # SGLang has no order of dispatch here, and vLLM's requests always have a priority.
    {"sglang": f"{events.ENGINE_QUEUE}.priority", "vllm": f"{events.ENGINE_DECODE}.evicted_tokens"}[tiny.ENGINE],
}


@pytest.fixture(scope="module")
def found(controlled):
    return keys_by_event([controlled / "job" / "events"])


def test_what_occurs_is_in_the_table(found):
    assert undocumented(found) == set()


def test_what_the_table_promises_occurs(found):
    assert ("trainer", events.LEASE_WAIT) in found
    others = {event.name for event in TABLE if event.written and event.level in ("coordinator", "agent")}
    assert missing(found) == LACKS | others - {name for _, name in found}


def _named(job, role: str, name: str) -> list[dict]:
    return [event["extra"] for event in tiny.events(job, "job", role) if event["event"] == name]


def test_a_stay_has_one_name_from_the_agent_loop_to_the_scheduler(controlled):
    called, served, queued = (
        {(extra["request_id"], extra["stay"]): extra for extra in _named(controlled, *where)}
        for where in (("rollout", events.TURN_ENGINE_CALL), ("server", events.ENGINE_GENERATE), ("server", events.ENGINE_QUEUE))
    )
    assert called.keys() <= served.keys() and queued.keys() <= served.keys()
    assert {extra["replica"] for extra in called.values()} == {0}
    for stay, extra in called.items():
        assert (extra["replica"], extra["node"], extra["turn"]) == tuple(served[stay][key] for key in ("replica", "node", "turn"))
        assert extra["node"] == "n0" and extra["turn"] == 1
    done = [extra for extra in served.values() if extra["finish"] != "abort"]
    assert done and all({"queue_sec", "prefill_sec", "decode_sec", "cached_tokens"} <= extra.keys() for extra in done)


def test_requests_say_their_score_and_how_long_they_were_parked(controlled):
    done = _named(controlled, "rollout", events.REQUEST_COMPLETE)
    assert done and all(0 <= extra["score"] <= 1 and extra["turns"] == 1 for extra in done)
    again = [extra for extra in done if extra["stays"] > 1]
    assert again and all(extra["parked_sec"] > 0 for extra in again)
