"""Two jobs, three steps one after the other and four interleaved, on a rollout node and a training node."""

import pytest

from tests.launcher.made_run import ORIGIN, MadeRun
from verl_mux.coordinator.config import make_config
from verl_mux.launcher import run_intervals, run_summary
from verl_mux.launcher.run_summary import segment_steps
from verl_mux.profiling.eventlog.events import REQUEST_COMPLETE

CONFIG = make_config(
    {
        "pools": {"rollout": {"nodes": [{"name": "r0"}]}, "train": {"nodes": [{"name": "t0"}, {"name": "t1"}]}},
        "schedule": [{"mode": "sequential", "steps": 3}, {"mode": "interleaved"}],
    }
)


@pytest.fixture
def result(tmp_path) -> dict:
    made = MadeRun(tmp_path)
    # Steps 1-3 alone: 10 s each for a, then 12 s each for b. Then together: 12 s for a, 14 s for b; b ends later.
    made.steps("a", [10, 20, 30, 80, 92, 104, 116], tokens=100, rewards=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    made.steps("b", [40, 52, 64, 84, 98, 112, 126], tokens=200, rewards=[0.0] * 4 + [0.9] * 3)
    for job, step, start, end in (("a", 5, 80, 90), ("b", 5, 90, 98), ("a", 6, 100, 110), ("b", 6, 108, 126)):
        made.phase(job, "rollout", step, start, end, "r0")
    made.phase("a", "train", 5, 90, 100, "t0", "t1")
    made.wait("a", "rollout", 5, 78, 80, "r0")
    made.wait("a", "rollout", 6, 96, 100, "r0")
    made.wait("a", "train", 5, 90.05, 90.25, "t0")
    made.wait("a", "rollout", 4, 30, 70, "r0")  # behind the barrier between the segments
    made.event("a", "sync", 5, 80, 82)
    # One engine of two replicas falls asleep while the other does; then the trainer does.
    made.event("a", "sleep", 5, 88.0, 88.5, role="server", worker=0)
    made.event("a", "sleep", 5, 88.2, 88.7, role="server", worker=1)
    made.event("a", "sleep", 5, 99.0, 99.3)
    made.event("a", REQUEST_COMPLETE, 5, 82, 85, role="rollout", worker=1)
    made.event("a", REQUEST_COMPLETE, 5, 82, 90, role="rollout", worker=0)
    return run_summary.summarise(run_intervals.read(tmp_path, ["a", "b", "ghost"]), CONFIG, ["a", "b", "ghost"], 7 << 30, 61.2345)


def test_a_job_that_never_finished_a_step_is_left_out(result):
    assert list(result["jobs"]) == ["a", "b"]


def test_steps_and_rewards(result):
    a, b = result["jobs"]["a"], result["jobs"]["b"]
    assert (a["steps"], a["reward_first"], a["reward_last"]) == (7, 0.2, 0.6)
    assert (b["steps"], b["reward_first"], b["reward_last"]) == (7, 0.0, 0.9)


def test_a_reward_that_was_no_number_is_left_out(tmp_path):
    made = MadeRun(tmp_path)
    made.steps("a", [10, 20, 30], tokens=100, rewards=[None, 0.2, 0.4])
    made.steps("b", [40], tokens=100, rewards=[None])
    jobs = run_summary.summarise(run_intervals.read(tmp_path, ["a", "b"]), CONFIG, ["a", "b"], 0, 0.0)["jobs"]
    assert [(job["reward_first"], job["reward_last"]) for job in jobs.values()] == [(0.3, 0.3), (0.0, 0.0)]


def test_periods_leave_out_the_step_behind_the_barrier_and_what_ran_after_the_first_job_ended(result):
    assert [(j["period_alone_s"], j["period_mux_s"]) for j in result["jobs"].values()] == [(10, 12), (12, 14)]


def test_throughput_is_steps_together_over_steps_one_after_the_other(result):
    # (1/12 + 1/14) steps a second together; 2 steps in 10 + 12 seconds one after the other
    assert result["mux"]["throughput_ratio"] == pytest.approx((1 / 12 + 1 / 14) / (2 / 22), abs=1e-4)


def test_token_throughput_counts_tokens_of_the_same_steps(result):
    # alone: 2 x 100 + 2 x 200 tokens in 20 + 24 s; together: 300 tokens in 36 s beside 400 in 28 s
    assert result["mux"]["token_throughput_ratio"] == pytest.approx((300 / 36 + 400 / 28) / (600 / 44), abs=1e-4)


def test_the_bubble_is_what_no_phase_covers_while_all_interleave(result):
    # from 84 (b's first interleaved step has ended) to 116 (a's last): r0 runs 84-98 and 100-116, of t0 and t1 each 90-100
    assert result["mux"]["bubble"] == {"rollout": round(1 - 30 / 32, 4), "train": round(1 - 20 / 64, 4)}


def test_seconds_by_phase_are_medians_over_interleaved_steps(result):
    seconds = result["jobs"]["a"]["phase_s"]
    assert list(seconds) == ["rollout", "train", "sync", "sleep", "wake", "wait_rollout", "wait_train"]
    assert (seconds["rollout"], seconds["train"], seconds["sync"], seconds["wake"]) == (10, 10, 2, 0)
    assert (seconds["wait_rollout"], seconds["wait_train"]) == (3, 0.2)


def test_engines_that_fall_asleep_at_the_same_time_count_once(result):
    assert result["jobs"]["a"]["phase_s"]["sleep"] == pytest.approx(0.7 + 0.3)


def test_from_the_last_sample_to_the_training_lease(result):
    assert result["mux"]["sample_to_lease_s"] == pytest.approx(0.05)


def test_memory_and_start_up_are_passed_on(result):
    assert (result["mux"]["peak_rss_bytes"], result["mux"]["startup_s"]) == (7 << 30, 61.234)


def test_without_a_single_step_there_are_no_figures_and_no_error(tmp_path):
    result = run_summary.summarise(run_intervals.read(tmp_path, ["a"]), CONFIG, ["a"], 0, 0.0)
    assert result["jobs"] == {}
    assert result["mux"]["throughput_ratio"] is None and result["mux"]["bubble"] == {"rollout": None, "train": None}


def test_a_run_that_only_interleaves_has_no_ratio(tmp_path):
    MadeRun(tmp_path).steps("a", [1, 2, 3])
    config = make_config({"pools": {"rollout": {"nodes": [{"name": "r0"}]}}})
    result = run_summary.summarise(run_intervals.read(tmp_path, ["a"]), config, ["a"], 0, 0.0)
    assert (result["mux"]["throughput_ratio"], result["jobs"]["a"]["period_alone_s"]) == (None, None)
    assert result["jobs"]["a"]["period_mux_s"] == 1


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ([{"mode": "interleaved"}], [("interleaved", 1, 10**9)]),
        (
            [{"mode": "sequential", "steps": 4}, {"mode": "uncoordinated", "steps": 2}, {"mode": "interleaved"}],
            [("sequential", 1, 4), ("uncoordinated", 5, 6), ("interleaved", 7, 10**9)],
        ),
    ],
)
def test_segments_follow_one_another(schedule, expected):
    config = make_config({"pools": {"rollout": {"nodes": [{"name": "r0"}]}}, "schedule": schedule})
    assert segment_steps(config.schedule) == expected


def test_the_time_between_an_end_and_a_resumption_is_nobodys_step_and_nobodys_idling(tmp_path):
    made = MadeRun(tmp_path)
    config = make_config({"pools": {"rollout": {"nodes": [{"name": "r0"}]}, "train": {"nodes": [{"name": "t0"}]}}})
    for job in ("a", "b"):
        made.start(job, 0)
        made.steps(job, [10, 20, 30], tokens=100)
        made.start(job, 1000)
    for job, step, end in (("a", 3, 1010), ("a", 4, 1020), ("a", 5, 1030), ("b", 4, 1010), ("b", 5, 1030)):
        made.event(job, "step", step, end - 5, end, tokens=100)
    made.phase("a", "rollout", 4, 1010, 1015, "r0")
    result = run_summary.summarise(run_intervals.read(tmp_path, ["a", "b"]), config, ["a", "b"], 0, 0.0)
    assert (result["jobs"]["a"]["steps"], result["jobs"]["b"]["steps"]) == (5, 5)
    assert (result["jobs"]["a"]["period_mux_s"], result["jobs"]["b"]["period_mux_s"]) == (10, 10)
    assert result["mux"]["bubble"]["rollout"] == 0.75


@pytest.mark.parametrize(("since", "seconds"), [(0.0, 30.0), (50.0, 20.0), (80.0, 0.0)])
def test_start_up_lasts_until_a_job_asks_for_its_first_step(tmp_path, since, seconds):
    made = MadeRun(tmp_path)
    for step, at in ((0, 10), (1, 30), (2, 70)):
        made.wait("a", "rollout", step, at, at + 1, "r0")
    assert run_summary.startup(run_intervals.read(tmp_path, ["a"]), ORIGIN.timestamp() + since) == seconds
