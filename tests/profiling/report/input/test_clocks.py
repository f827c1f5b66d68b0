"""Hosts whose clocks are minutes apart: times are moved to one clock, which is said, and findings are those of one clock."""

import pytest

from tests.profiling.documented import Documented
from tests.profiling.made_logs import read_run
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output.summary import find_all

SERVERS = {("server", 2): 180.0, ("server", 3): 180.0}
WORKERS = {("rollout", worker): -240.0 for worker in (4, 5, 6, 7)}
SLOW = {(1, step): 2.5 for step in range(1, 7)}
AHEAD = "clock of {} {:.0f} s {}: its times were moved"
MOVED = {
    "servers": (SERVERS, (), [AHEAD.format(f"replica {r}", 180, "ahead") for r in (2, 3)]),
    "workers": (WORKERS, ("engine_generate",), [AHEAD.format(f"worker {w}", 240, "behind") for w in (4, 5, 6, 7)]),
}


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("slow", [{}, SLOW])
def test_clocks_apart_are_said_and_accuse_none(tmp_path, name, slow):
    shift, without, said = MOVED[name]
    run = read_run(Documented(shift=shift, without=without, slow=slow).write(tmp_path))
    assert sorted(run.faults.noticed) == said
    analysis = Analysis(run)
    assert [(it.kind, it.replica) for it in find_all(analysis)] == ([("straggler", 1)] if slow else [])
    assert analysis.by_step["total"].max() < 130 and analysis.engines.stays.filter(seconds=0).is_empty()


def test_workers_that_begin_a_little_later_keep_their_times(tmp_path):
    run = read_run(Documented(shift={("rollout", 4): 2.0}, without=("engine_generate",)).write(tmp_path))
    assert not run.faults.noticed
