"""verl's own streaming trainer on a real engine, with our event log and the training trigger, no GPU."""

from __future__ import annotations

import pytest

from tests.e2e import tiny
from tests.e2e.conftest import ENOUGH, STREAMED
from tests.profiling.made_logs import read_run
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output.summary import summarise

pytestmark = pytest.mark.e2e
BATCH, TRIGGER = 4, "mux/rollout/trigger/"
_LIMIT_S = 600


@pytest.fixture(scope="module")
def job(streaming, request):
    """Where it is over, the next job starts up, beside tests that need less of the machine."""
    directory, process = streaming
    assert process.wait(_LIMIT_S) == 0, (directory / "job" / "job.log").read_text()[-3000:]
    request.getfixturevalue("controlling")
    return directory


def test_it_trains_when_enough_groups_are_ready_and_never_on_more_than_a_batch(job):
    figures = [tiny.figures(job, "job", step, TRIGGER) for step in range(1, STREAMED + 1)]
    assert all(1 <= it["groups"] <= BATCH for it in figures)
    assert all(it["groups"] >= ENOUGH for it in figures if not it["waited"])


def test_low_entropy_doubles_both_thresholds(job):
    last = tiny.figures(job, "job", STREAMED, TRIGGER)
    assert (last["n_min"], last["t_max_s"], last["mood"]) == (2 * ENOUGH, 60, 1)


def test_the_parts_of_its_steps_and_its_requests_are_logged(job):
    logged = {event["event"] for event in tiny.events(job, "job")}
    parts = {events.SAMPLE_WAIT, events.OLD_LOG_PROB, events.UPDATE_ACTOR, events.SYNC, events.STEP}
    assert parts <= logged
    report = summarise(Analysis(read_run(job / "job")))
    assert report["steps"] == STREAMED and report["requests"] >= STREAMED * ENOUGH
    assert report["event_share"][events.SAMPLE_WAIT] > 0
