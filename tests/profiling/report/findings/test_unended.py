"""Requests that came to no end: failed ones by what they raised, and those of which nothing is heard any more."""

from tests.profiling.made_logs import Lines, read_run
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output.summary import find_all


def found(directory):
    return [
        finding for finding in find_all(Analysis(read_run(directory))) if finding.kind in ("failed_requests", "endless_request")
    ]


def a_run(directory, count, errors=(), endless=(), until=20.0, aborted="failed"):
    """`count` requests of 10 s in step 3; those numbered in `errors` fail with the error there."""
    lines = Lines(1, 3)
    for number in range(count):
        about = {"request_id": f"r{number}"}
        lines.add(0.1, "request_start", extra=about)
        lines.add(1.0, "turn_engine_call", 0.5, about | {"turn": 1, "generated_tokens": 3})
        lines.add(4.0, "turn_engine_call", 3.0, about | {"turn": 2, "generated_tokens": 30})
        if number in endless:
            continue
        error = dict(errors).get(number)
        extra = {"reason": aborted, **({"error": error} if error else {})} if number in dict(errors) else {}
        event = "aborted_request_with_cancelled_error" if extra else "async_rollout_request_complete"
        lines.add(10.0 + number / 1000, event, 10.0, about | extra)
    lines.add(until, "total_step_duration", until)
    lines.write(directory)
    return directory


def test_failed_requests_are_counted_and_named_by_what_they_raised(tmp_path):
    errors = dict.fromkeys(range(50), "ToolError: no server") | dict.fromkeys(range(50, 60), "ValueError: odd")
    (failed,) = found(a_run(tmp_path, 180, errors))
    assert failed.text == "60 of 180 requests failed: ToolError: no server (50), ValueError: odd (10)"
    assert (failed.kind, failed.step, failed.evidence["errors"]) == (
        "failed_requests", 3, {"ToolError: no server": 50, "ValueError: odd": 10},
    )  # fmt: skip


def test_where_all_failed_it_is_a_finding_too_and_without_an_error_in_the_log_it_says_so(tmp_path):
    (failed,) = found(a_run(tmp_path, 8, dict.fromkeys(range(8))))
    assert failed.text == "8 of 8 requests failed: its error was not logged (8)"


def test_requests_that_were_cut_off_or_failed_once_and_then_ended_have_not_failed(tmp_path):
    assert found(a_run(tmp_path, 20, dict.fromkeys(range(10), "x"), aborted="cut off")) == []
    lines = Lines(1, 4)
    for number in range(20):
        about = {"request_id": f"again{number}"}
        lines.add(30.0, "aborted_request_with_cancelled_error", 1.0, about | {"reason": "failed", "error": "x"})
        lines.add(40.0, "async_rollout_request_complete", 10.0, about)
    lines.write(tmp_path)
    assert found(tmp_path) == []


def test_a_request_that_never_ends_is_named_with_its_worker_turn_and_last_event(tmp_path):
    (endless,) = found(a_run(tmp_path, 20, endless=[7], until=400.0))
    assert endless.text == "r7 on worker 1 has no end: in turn 2, 396 s after its last event, turn_engine_call"
    assert (endless.request_id, endless.worker, endless.turn, endless.step, round(endless.seconds)) == ("r7", 1, 2, 3, 396)


def test_lines_that_were_left_out_excuse_an_earlier_step_of_the_same_job_alone(tmp_path):
    a_run(tmp_path / "a", 20, endless=[7], until=400.0)
    later = Lines(1, 9)
    later.add(0.1, "request_start", extra={"request_id": "ended"})
    later.add(10.0, "async_rollout_request_complete", 10.0, {"request_id": "ended"})
    later.write(tmp_path / "b")
    with next((tmp_path / "a").rglob("*.jsonl")).open("a") as file:
        file.write("torn\n")
    assert [it.request_id for it in found(tmp_path)] == ["r7"]


def test_a_run_that_was_broken_off_accuses_no_request(tmp_path):
    assert found(a_run(tmp_path, 20, endless=range(10, 20), until=30.0)) == []
