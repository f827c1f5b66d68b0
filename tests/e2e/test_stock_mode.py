"""verl's own streaming trainer on a real engine, with our event log and the training trigger, no GPU."""

from __future__ import annotations

import re

import pytest

from tests.e2e import tiny
from tests.e2e.conftest import ENOUGH, STREAMED
from tests.profiling.made_logs import read_run
from verl_mux.profiling.eventlog import events
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output.summary import summarise

pytestmark = pytest.mark.e2e
BATCH = 4
_LIMIT_S = 600


@pytest.fixture(scope="module")
def job(streaming, request):
    """Where it is over, the next job starts up, beside tests that need less of the machine."""
    directory, process = streaming
    assert process.wait(_LIMIT_S) == 0, (directory / "job" / "job.log").read_text()[-3000:]
    request.getfixturevalue("controlling")
    return directory


def _trigger(directory, step: int) -> dict[str, float]:
    line = next(x for x in (directory / "job" / "job.log").read_text().splitlines() if f"step:{step} - " in x)
    return {name: float(value) for name, value in re.findall(r"mux/rollout/trigger/(\w+):(?:np\.\w+\()?(-?[0-9.e-]+)", line)}


def test_it_trains_when_enough_groups_are_ready_and_never_on_more_than_a_batch(job):
    figures = [_trigger(job, step) for step in range(1, STREAMED + 1)]
    assert all(1 <= it["groups"] <= BATCH for it in figures)
    assert all(it["groups"] >= ENOUGH for it in figures if not it["waited"])


def test_low_entropy_doubles_both_thresholds(job):
    assert (_trigger(job, STREAMED)["n_min"], _trigger(job, STREAMED)["t_max_s"], _trigger(job, STREAMED)["mood"]) == (
        2 * ENOUGH,
        60,
        1,
    )


def test_the_parts_of_its_steps_and_its_requests_are_logged(job):
    logged = {event["event"] for event in tiny.events(job, "job")}
    parts = {events.SAMPLE_WAIT, events.OLD_LOG_PROB, events.UPDATE_ACTOR, events.SYNC, events.STEP}
    assert parts <= logged
    report = summarise(Analysis(read_run(job / "job")))
    assert report["steps"] == STREAMED and report["requests"] >= STREAMED * ENOUGH
    assert report["event_share"][events.SAMPLE_WAIT] > 0
