"""A run that grows as a test says."""

import pytest

from verl_mux.profiling.eventlog.log import EventLog
from verl_mux.profiling.live.job_states import State
from verl_mux.profiling.live.screen import Choice, as_json

EPOCH = 4_000_000_000.0  # after whatever the logs say of themselves


@pytest.fixture
def run(tmp_path):
    """A run of two jobs: a writer for each role of each, and a look at what all of it adds up to."""
    logs = {}

    def log(job, role, at, event, seconds=None, step=1, worker=0, start="first", **extra):
        key = job, role, worker, start
        logs.setdefault(key, EventLog(tmp_path / job / "events", worker, role, job, run=start))
        logs[key].log(event, seconds, extra, step, EPOCH + at)

    state = State(tmp_path)

    def look(choice=None):
        for it in logs.values():
            it.flush()
        state.look()
        return as_json(state, choice or Choice())

    log.look, log.folder, log.state = look, tmp_path, state
    return log
