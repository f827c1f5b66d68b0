"""Which files are logs, and what their paths say."""

import pytest

from verl_mux.profiling.plain.lines import find_log_files

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


@pytest.mark.parametrize(("path", "told"), PATHS.items())
def test_a_path_tells_job_role_step_and_worker(tmp_path, path, told):
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text("{}")
    (file,) = find_log_files(tmp_path)
    assert (file.job, file.role, file.step, file.worker) == told


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
