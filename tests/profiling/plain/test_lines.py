"""Files of a log, lines of other jobs, intervals and the throughput ratio."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from verl_mux.profiling.plain.lines import clip, find_log_files, length, overlap, throughput_ratio, union

PATHS = {
    "step_3/worker_0.jsonl": ("", "rollout", 3, 0),
    "a/events/trainer/step_3/worker_0.jsonl": ("a", "trainer", 3, 0),
    "a/events/rollout/step_0/worker_12.jsonl": ("a", "rollout", 0, 12),
    "coordinator/events/coordinator/step_0/worker_0.jsonl": ("coordinator", "coordinator", 0, 0),
    "logs/first/step_1/worker_1.jsonl": ("logs/first", "rollout", 1, 1),
    "server/step_1/worker_1.2.jsonl": ("", "server", 1, 1),
    "worker_4.jsonl": ("", "rollout", 0, 4),
    "a/events/trainer/worker_0.jsonl": ("a", "trainer", 0, 0),
}


@pytest.mark.parametrize(("path", "noted"), PATHS.items())
def test_a_path_tells_job_role_step_and_worker(tmp_path, path, noted):
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text("{}")
    (file,) = find_log_files(tmp_path)
    assert (file.job, file.role, file.step, file.worker) == noted


def test_a_jobs_own_event_directory_still_tells_the_job(tmp_path):
    path = tmp_path / "a" / "events" / "trainer" / "step_1" / "worker_0.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    for root in (tmp_path / "a" / "events", tmp_path / "a" / "events" / "trainer"):
        (file,) = find_log_files(root)
        assert (file.job, file.role) == ("a", "trainer")


@pytest.mark.parametrize("path", ["step_1/worker_x.jsonl", "step_1/notes.jsonl", "0.jsonl"])
def test_other_files_are_left_alone(tmp_path, path):
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text("{}")
    assert find_log_files(tmp_path) == []


def test_steps_and_workers_come_in_order_of_their_numbers(tmp_path):
    for step in (10, 9):
        for worker in (11, 2):
            path = tmp_path / f"step_{step}" / f"worker_{worker}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_text("{}")
    assert [(file.step, file.worker) for file in find_log_files(tmp_path)] == [(9, 2), (9, 11), (10, 2), (10, 11)]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda t: (t[0], t[0] + t[1])), max_size=12))
def test_the_union_counts_every_second_once(spans):
    assert length(spans) == len({second for start, end in spans for second in range(start, end)})


def test_intervals():
    assert union([(3, 4), (0, 1), (0.5, 2), (5, 5), (7, 6)]) == [(0, 2), (3, 4)]
    assert length([(0, 2), (1, 3)]) == 3
    assert clip([(0, 2), (5, 9)], (1, 6)) == [(1, 2), (5, 6)]
    assert overlap((0, 1), (2, 3)) == 0
    assert overlap((0, 2), (1, 5)) == 1


def test_two_equal_jobs_that_hide_each_other_completely_are_twice_as_fast():
    assert throughput_ratio({"a": 10.0, "b": 10.0}, {"a": 10.0, "b": 10.0}) == 2.0
    assert throughput_ratio({"a": 10.0, "b": 10.0}, {"a": 20.0, "b": 20.0}) == 1.0
    assert throughput_ratio({"a": 10.0, "b": None}, {"a": 10.0, "b": 10.0}) is None
    assert throughput_ratio({}, {}) is None
