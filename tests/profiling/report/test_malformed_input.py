"""Input that is not as it should be: counted, named, never a traceback, and the rest is analysed."""

import json
import os
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.exploring import examples
from tests.profiling.made_logs import SEED_LINES, Made, make_run, read_run
from verl_mux.errors import UserError
from verl_mux.profiling.plain.lines import find_log_files
from verl_mux.profiling.report.input.run_log import read_files
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output import console
from verl_mux.profiling.report.output.page.page import make_page
from verl_mux.profiling.report.output.summary import ENDLESS, summarise
from verl_mux.profiling.report.output.trace import write_trace

GOOD = (
    '{"timestamp": "2025-08-11T23:19:45.001830", "event": "async_generate_duration", "duration_sec": 1.0, "workid": 0, "step": 1}'
)


def report(directory):
    return summarise(Analysis(read_run(directory)))


def written(directory, *lines, worker=0, step=1):
    path = directory / f"step_{step}" / f"worker_{worker}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(line if isinstance(line, bytes) else line.encode() + b"\n" for line in lines))
    return directory


def test_the_seeds_own_lines_parse(tmp_path):
    summary = report(written(tmp_path, *SEED_LINES, worker=2, step=4))
    assert (summary["skipped_lines"], summary["input"]["events"], summary["requests"]) == (0, 4, 2)


BAD = {
    '{"timestamp": "2025-08-11T23:19:45.0018': "not JSON (torn line?)",
    "[1, 2, 3]": "not a JSON object",
    '"text"': "not a JSON object",
    '{"event": "a"}': "missing: timestamp",
    '{"timestamp": "2025-08-11T23:19:45"}': "missing: event",
    '{"timestamp": 3, "event": "a"}': "wrong type: timestamp",
    '{"timestamp": "2025-08-11T23:19:45", "event": ["a"]}': "wrong type: event",
    '{"timestamp": "2025-08-11T23:19:45", "event": "a", "duration_sec": "long"}': "wrong type: duration_sec",
    '{"timestamp": "2025-08-11T23:19:45", "event": "a", "workid": "two"}': "wrong type: workid",
    '{"timestamp": "2025-08-11T23:19:45", "event": "a", "step": 1.5}': "wrong type: step",
    '{"timestamp": "2025-08-11T23:19:45", "event": "a", "extra": [1]}': "wrong type: extra",
    '{"timestamp": "2025-08-11T23:19:45", "event": "a", "step": -3}': "negative step",
    '{"timestamp": "2025-08-11T23:19:45", "event": "a", "workid": -1}': "negative workid",
    '{"timestamp": "yesterday", "event": "a"}': "unreadable timestamp",
    '{"timestamp": "2025-08-11", "event": "a"}': "unreadable timestamp",
    '{"timestamp": "2025-08-11T23:19:45", "event": "a", "duration_sec": -1.0}': "negative duration",
    '{"timestamp": "2025-08-11T23:19:45", "event": "a", "duration_sec": 1e300}': "impossible duration",
    '{"timestamp": "2025-08-11T23:19:45", "event": "a", "duration_sec": Infinity}': "impossible duration",
}


@pytest.mark.parametrize(("line", "reason"), BAD.items())
def test_a_bad_line_is_counted_by_name_and_the_rest_is_read(tmp_path, line, reason):
    summary = report(written(tmp_path, GOOD, line, GOOD))
    assert summary["input"]["skipped"] == {reason: 1}
    assert summary["skipped_lines"] == 1
    assert summary["event_share"] == {"async_generate_duration": 100.0}
    assert summary["input"]["examples"][reason].endswith("worker_0.jsonl, line 2")
    assert (summary["steps"], summary["workers"], summary["input"]["noticed"]) == (1, 1, {})


def test_bytes_that_are_no_text_are_counted(tmp_path):
    assert report(written(tmp_path, GOOD, b"\xff\xfe\x00garbage\x00\n", GOOD))["skipped_lines"] == 1


def test_blank_lines_are_no_lines(tmp_path):
    summary = report(written(tmp_path, GOOD, "", "   ", GOOD))
    assert (summary["skipped_lines"], summary["input"]["events"]) == (0, 2)


def test_a_torn_last_line_costs_that_line(tmp_path):
    summary = report(written(tmp_path, GOOD, GOOD[:50].encode()))
    assert (summary["skipped_lines"], summary["input"]["events"]) == (1, 1)


@pytest.mark.parametrize("content", ["x", '{"timestamp": "2025-08-11T23:19:45", "event": "a", "text": "x"}'])
def test_one_enormous_line_is_skipped_wherever_it_stands(tmp_path, content):
    enormous = content.replace("x", "x" * (5 * 2**20))
    for order in ((enormous, GOOD), (GOOD, enormous, GOOD), (GOOD, enormous)):
        summary = report(written(tmp_path, *order))
        assert summary["input"]["skipped"] == {"line over 1 MiB": 1}
        assert summary["input"]["events"] == len(order) - 1


def test_nan_inside_extra_keeps_the_line(tmp_path):
    line = '{"timestamp": "2025-08-11T23:19:45", "event": "step_response_length_stats", "extra": {"response_length_mean": NaN}}'
    summary = report(written(tmp_path, line))
    assert (summary["skipped_lines"], summary["input"]["events"]) == (0, 1)


def test_a_wrong_value_inside_extra_costs_that_value(tmp_path):
    line = '{"timestamp": "2025-08-11T23:19:45", "event": "turn_engine_call", "duration_sec": 2.0, "extra": %s}'
    summary = report(written(tmp_path, line % '{"request_id": "a", "turn": "first"}', line % '{"request_id": 7, "turn": 0}'))
    assert (summary["skipped_lines"], summary["requests"]) == (0, 2)
    assert summary["input"]["noticed"] == {"wrong type: extra.turn": 1}


def test_a_line_that_names_no_worker_or_step_takes_its_paths(tmp_path):
    line = '{"timestamp": "2025-08-11T23:19:45", "event": "async_generate_duration", "duration_sec": 2.0}'
    analysis = Analysis(read_run(written(tmp_path, line, worker=5, step=9)))
    assert analysis.run.tables.totals.select("step", "worker").rows() == [(9, 5)]


SPELLINGS = ["2025-08-11T23:19:45", "2025-08-11 23:19:45.500", "2025-08-11T23:19:45Z", "2025-08-11T23:19:45+02:00"]


@pytest.mark.parametrize("stamp", SPELLINGS)
def test_other_iso_spellings_are_read(tmp_path, stamp):
    assert report(written(tmp_path, GOOD.replace("2025-08-11T23:19:45.001830", stamp)))["skipped_lines"] == 0


def test_a_lone_line_from_another_year_is_skipped(tmp_path):
    lines = [GOOD] * 20 + [GOOD.replace("2025-", "1970-")]
    assert report(written(tmp_path, *lines))["input"]["skipped"] == {"timestamp a day or more from the rest of its file": 1}


TEXTS = [
    {"event": "\ud800x"},
    {"role": "\ud800x"},
    {"job": "\udfffx"},
    {"extra": {"request_id": "\ud800x"}},
    {"extra": {"tool": "\ud800x"}},
    {"extra": {"\ud800x": [{"\udc00": "\ud800"}]}},
    {"\ud800x": 1},
]


@pytest.mark.parametrize("keys", TEXTS)
def test_half_a_surrogate_pair_is_spelled_out(tmp_path, keys):
    summary = report(written(tmp_path, GOOD, json.dumps(json.loads(GOOD) | keys)))
    assert summary["input"]["noticed"] == {"half a surrogate pair in a text": 1}
    assert summary["input"]["examples"]["half a surrogate pair in a text"].endswith("line 2")
    assert (summary["skipped_lines"], summary["input"]["events"]) == (0, 2)
    json.dumps(summary, ensure_ascii=False).encode()


def test_half_pairs_that_differ_remain_different(tmp_path):
    line = '{"timestamp": "2025-08-11T23:19:45", "event": "async_rollout_request_complete", "extra": {"request_id": "\\ud80%dx"}}'
    assert report(written(tmp_path, line % 0, line % 1))["requests"] == 2


def test_whole_pairs_are_text_and_an_escaped_backslash_is_one(tmp_path):
    lines = [json.dumps(json.loads(GOOD) | {"event": event}) for event in ("\U0001f600", "\\ud800")]
    summary = report(written(tmp_path, *lines))
    assert (summary["skipped_lines"], summary["input"]["noticed"]) == (0, {})


def test_a_job_whose_directory_is_no_text_is_spelled_out(tmp_path):
    written(tmp_path / os.fsdecode(b"job\xff") / "events", GOOD, "torn")
    summary = report(tmp_path)
    assert (summary["input"]["events"], summary["skipped_lines"]) == (1, 1)
    json.dumps(summary, ensure_ascii=False).encode()


def test_the_first_place_counts_blank_skipped_and_enormous_lines(tmp_path):
    lines = ["", GOOD, "torn", "x" * (2 * 2**20), GOOD, "", GOOD.replace("1.0", "-1.0")]
    examples = report(written(tmp_path, *lines))["input"]["examples"]
    assert {reason: where.rpartition(" ")[2] for reason, where in examples.items()} == {
        "not JSON (torn line?)": "3", "line over 1 MiB": "4", "negative duration": "7",
    }  # fmt: skip


def test_a_request_without_an_end_is_noticed(tmp_path):
    make_run(tmp_path, Made(steps=1, workers=2, requests=8))
    path = tmp_path / "step_1" / "worker_1.jsonl"
    kept = [line for line in path.read_text().splitlines() if not ("request_complete" in line and '"1-1-3"' in line)]
    path.write_text("\n".join(kept))
    summary = report(tmp_path)
    assert summary["input"]["noticed"] == {ENDLESS: 1}
    assert summary["input"]["examples"][ENDLESS] == "step 1, worker 1, request 1-1-3"
    assert (summary["requests"], sum(summary["turns"]["counts"].values())) == (16, 15)


def test_a_missing_worker_is_named(tmp_path):
    make_run(tmp_path, Made(steps=2, workers=4, requests=8))
    (tmp_path / "step_2" / "worker_1.jsonl").unlink()
    summary = report(tmp_path)
    assert summary["input"]["noticed"] == {"missing worker: step 2, worker 1": 1}
    assert summary["workers"] == 4


def test_an_empty_directory_gives_an_empty_report(tmp_path):
    summary = report(tmp_path)
    assert (summary["steps"], summary["workers"], summary["requests"], summary["findings"]) == (0, 0, 0, [])
    json.dumps(summary, allow_nan=False)


def test_an_empty_file_gives_an_empty_report(tmp_path):
    assert report(written(tmp_path))["input"]["events"] == 0


def test_a_file_that_cannot_be_read_any_more_is_counted_and_the_rest_is_read(tmp_path):
    written(written(tmp_path, GOOD), GOOD, worker=1)
    files = find_log_files(tmp_path)
    (tmp_path / "step_1" / "worker_0.jsonl").unlink()  # the run's disk cleaner came in between
    summary = summarise(Analysis(read_files(tmp_path, files)))
    assert summary["input"]["skipped"] == {"unreadable file": 1}
    assert summary["input"]["events"] == 1


@pytest.mark.parametrize("made", ["missing", "a file"])
def test_what_is_no_directory_is_refused_in_one_line(tmp_path, made):
    path = tmp_path / "x"
    if made == "a file":
        path.write_text("")
    with pytest.raises(UserError, match="step_<N>"):
        read_run(path)


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8))
keys = st.sampled_from(["timestamp", "event", "duration_sec", "extra", "workid", "step", "role", "job", "other"])
extras = st.dictionaries(
    st.sampled_from(["request_id", "turn", "turns", "generated_tokens", "queue_sec", "nodes", "phase", "job"]),
    st.one_of(scalars, st.lists(scalars, max_size=2), st.dictionaries(st.text(max_size=3), scalars, max_size=2)),
)
stamps = st.sampled_from(
    ["2025-08-11T23:19:45.001830", "2025-08-11T23:19:46", "2025-08-11T23:59:46.5", "0001-01-01T00:00:00", "9999-12-31"]
)
names = st.sampled_from([
    "request_start", "turn_engine_call", "async_rollout_request_complete", "reward_calculation", "total_step_duration",
    "lease_held", "lease_wait", "phase", "segment", "sleep", "engine_decode", "unheard_of", "step",
])  # fmt: skip
plausible = st.fixed_dictionaries(
    {"timestamp": stamps, "event": names},
    optional={
        "duration_sec": st.one_of(st.floats(), st.integers(-2, 10**12)), "extra": st.one_of(extras, scalars), "workid": scalars,
        "step": scalars, "role": st.sampled_from(["trainer", "server", "coordinator", "rollout", "?"]), "job": scalars,
    },
)  # fmt: skip
objects = st.one_of(plausible, st.dictionaries(keys, scalars), st.lists(scalars, max_size=3), scalars)


@settings(
    max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(lines=st.lists(objects, max_size=12), tear=st.integers(0, 400), noise=st.binary(max_size=30))
def test_no_input_raises_and_every_line_is_read_or_counted(tmp_path, lines, tear, noise):
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    (tmp_path / "step_1").mkdir(exist_ok=True)
    (tmp_path / "step_1" / "worker_0.jsonl").write_bytes(text)
    (tmp_path / "step_1" / "worker_1.jsonl").write_bytes(text[:tear] + noise)
    summary = report(tmp_path)
    json.dumps(summary, allow_nan=False)
    present = sum(bool(raw.strip()) for path in tmp_path.rglob("*.jsonl") for raw in path.read_bytes().split(b"\n"))
    assert summary["input"]["events"] + summary["skipped_lines"] >= present


@settings(
    max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(chance=st.randoms(use_true_random=False))
def test_a_log_with_random_damage_still_tells_what_it_holds(tmp_path, chance):
    """In figures, on the page, in a trace and on a terminal."""
    shutil.rmtree(tmp_path)
    make_run(tmp_path, Made(steps=1, workers=2, requests=30, stalls={}, slow_rewards={(1, 1, 5): 200.0}))
    for path in tmp_path.rglob("*.jsonl"):
        data = bytearray(path.read_bytes())
        for _ in range(8):
            place = chance.randrange(len(data))
            data[place : place + chance.randrange(40)] = bytes(chance.randrange(256) for _ in range(chance.randrange(40)))
        path.write_bytes(bytes(data))
    analysis = Analysis(read_run(tmp_path))
    summary = summarise(analysis)
    assert summary["requests"] >= 45
    assert make_page(analysis, summary).encode() and console.render(summary, "run")
    write_trace(analysis, tmp_path / "trace.json")
    json.loads((tmp_path / "trace.json").read_text())
