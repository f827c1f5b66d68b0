"""The table of events, what our code writes, and what a real job's log holds: one over-sampled job with two replicas."""

from __future__ import annotations

import pytest

from tests.e2e import tiny
from tests.e2e.conftest import OVERSAMPLED
from tests.profiling.eventlog.occurring import keys_by_event, missing, undocumented
from verl_mux.profiling.eventlog import events

pytestmark = pytest.mark.e2e
STEPS, REPLICAS = 4, 2
_LIMIT_S = 600

# What one such job cannot have: event -> why not.
NOT_HERE = {
    events.TOOL_EXECUTION: "its agent loop calls no tool",
    events.REQUEST_MIGRATED: "nothing is migrated without a second job",
    events.MIGRATION: "nothing is migrated without a second job",
    events.REQUEST_PADDED: "what is cut off goes on, no group is given up",
    events.ADV: "in verl's own modes",
    events.SAMPLE_WAIT: "in verl's own modes",
    events.REF: "no reference policy",
    events.VALUES: "no critic",
    events.UPDATE_CRITIC: "no critic",
    events.VALIDATE: "no validation",
    events.ENGINE_RETRACT: "SGLang's scheduler ends with an exception when it prefills a thrown out request without a GPU",
    events.LOG_DROPPED: "its queue is never full",
    events.LOG_COST: "only where it is asked for",
}

NO_SPECULATION = {f"{events.ENGINE_GENERATE}.{key}" for key in ("drafted_tokens", "accepted_tokens")}


@pytest.fixture(scope="module")
def job(assets, tmp_path_factory):
    """The folder of a finished job."""
    directory = tmp_path_factory.mktemp("two_replicas")
    keys = [
        *OVERSAMPLED,
        "data.max_response_length=96",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        "ray_kwargs.ray_init.num_gpus=3",
        "mux.nodes.rollout=[r0,r1]",
        f"trainer.save_freq={STEPS}",
        "mux.rollout.dispatch.order=sjf",
    ]
    process = tiny.start_job("job", tiny.overrides(assets, STEPS), directory, None, *keys)
    try:
        assert process.wait(_LIMIT_S) == 0, (directory / "job" / "job.log").read_text()[-3000:]
    finally:
        process.kill()
    return directory


@pytest.fixture(scope="module")
def found(job):
    return keys_by_event([job / "job" / "events"])


def test_what_occurs_is_in_the_table(found):
    assert undocumented(found) == set()


def test_what_the_table_promises_occurs(found):
    of_coordinator = {event.name for event in events.TABLE if event.level == "coordinator"}  # it runs without one
    assert ("trainer", events.LEASE_WAIT) in found
    absent = {name for name in missing(found) if name.partition(".")[0] not in NOT_HERE.keys() | of_coordinator}
    assert absent == NO_SPECULATION


def _named(job, role: str, name: str) -> list[dict]:
    return [event["extra"] for event in tiny.events(job, "job", role) if event["event"] == name]


def test_a_stay_has_one_name_from_the_agent_loop_to_the_scheduler(job):
    called, served, queued = (
        {(extra["request_id"], extra["stay"]): extra for extra in _named(job, *where)}
        for where in (("rollout", events.TURN_ENGINE_CALL), ("server", events.ENGINE_GENERATE), ("server", events.ENGINE_QUEUE))
    )
    assert called.keys() <= served.keys() and queued.keys() <= served.keys()
    assert {extra["replica"] for extra in called.values()} == set(range(REPLICAS))
    for stay, extra in called.items():
        assert (extra["replica"], extra["node"], extra["turn"]) == tuple(served[stay][key] for key in ("replica", "node", "turn"))
        assert extra["node"] == f"r{extra['replica']}" and extra["turn"] == 1
    done = [extra for extra in served.values() if extra["finish"] != "abort"]
    assert done and all({"queue_sec", "prefill_sec", "decode_sec", "cached_tokens"} <= extra.keys() for extra in done)


def test_requests_say_their_score_and_how_long_they_were_parked(job):
    done = _named(job, "rollout", events.REQUEST_COMPLETE)
    assert done and all(0 <= extra["score"] <= 1 and extra["turns"] == 1 for extra in done)
    again = [extra for extra in done if extra["stays"] > 1]
    assert again and all(extra["parked_sec"] > 0 for extra in again)
