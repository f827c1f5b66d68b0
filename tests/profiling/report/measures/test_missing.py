"""What a log does not tell is said, with the event or field that would, and what it has is used."""

import pytest

from tests.profiling.documented import Documented
from tests.profiling.made_logs import Made, make_run, read_run
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output.console import render
from verl_mux.profiling.report.output.summary import summarise


def report(folder):
    return summarise(Analysis(read_run(folder)))


def missing(folder):
    return {row["what"]: row["needs"] for row in report(folder)["input"]["missing"]}


def test_a_log_that_names_no_engines_says_so(tmp_path):
    known = missing(make_run(tmp_path, Made(parts=False, tokens=False)))
    assert {"engines", "tokens", "tools", "rewards", "steps of the trainer"} <= known.keys()
    assert "replica, node of turn_engine_call" in known["engines"]


def test_what_was_logged_is_not_asked_for(tmp_path):
    known = missing(Documented(stay=True, carried=0.25, tools=0.5, queue={(1, 0): 1.0}).write(tmp_path))
    assert list(known) == ["counters of engines"]


def test_parked_time_is_asked_for_where_requests_went_on_in_another_step(tmp_path):
    assert "parked time" not in missing(Documented(without=("request_parked",)).write(tmp_path / "whole"))
    assert "parked time" in missing(Documented(without=("request_parked",), carried=0.25).write(tmp_path / "cut"))


def test_the_job_that_lacks_it_is_named(tmp_path):
    Documented(job="a").write(tmp_path)
    Documented(job="b", without=("replica", "engine_generate")).write(tmp_path / "b")
    (engines,) = (row for row in report(tmp_path)["input"]["missing"] if row["what"] == "engines")
    assert engines["jobs"] == ["b"]


def test_a_terminal_says_it_too(tmp_path):
    from rich.console import Console

    console = Console(record=True, width=120)
    console.print(render(report(Documented().write(tmp_path)), "x"))
    assert "stays of a turn: stay of turn_engine_call would tell" in console.export_text()


@pytest.mark.parametrize("unlogged", [(), ("replica", "node"), ("engine_generate",), ("request_id",)])
def test_engines_are_known_by_what_either_side_says(tmp_path, unlogged):
    """Without `stay`; `replica` from the server's own lines, from the callers', or from lines that name no request."""
    log = Documented(without=() if unlogged == ("request_id",) else unlogged)
    folder = log.write(tmp_path)
    if unlogged == ("request_id",):
        for file in folder.rglob("server/*/*.jsonl"):
            file.write_text(file.read_text().replace('"request_id"', '"rid"'))
        for file in folder.rglob("rollout/*/*.jsonl"):
            file.write_text(file.read_text().replace('"replica"', '"where"'))
    rows = report(folder)["replicas"]
    assert [(row["replica"], row["stays"]) for row in rows] == [(replica, 192) for replica in range(4)]
    assert all(row["seconds_per_token"] == pytest.approx(0.02, rel=0.1) for row in rows)


@pytest.mark.parametrize("unlogged", [(), ("request_parked", "request_requeued")])
def test_a_request_that_was_cut_off_is_one_request_without_its_parked_time(tmp_path, unlogged):
    run = Analysis(read_run(Documented(carried=0.25, without=unlogged).write(tmp_path)))
    assert run.finished.height == 6 * 128
    assert run.finished["seconds"].max() < 60 and run.finished["other"].max() < 1.0


def test_a_name_that_comes_again_in_another_step_is_another_request(tmp_path):
    folder = Documented(without=("replica", "engine_generate")).write(tmp_path)
    for file in folder.rglob("rollout/*/*.jsonl"):
        step = int(file.parent.name.removeprefix("step_"))
        file.write_text(file.read_text().replace(f'"request_id": "{step:02}', '"request_id": "'))
    assert Analysis(read_run(folder)).finished.height == 6 * 128
