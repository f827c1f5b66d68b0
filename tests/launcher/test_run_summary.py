"""The figures of a run: its steps, its groups' periods as predicted and as measured, its moves."""

import pytest

from tests.launcher.made_run import ORIGIN, MadeRun
from verl_mux.coordinator.config import make_config
from verl_mux.launcher import run_intervals, run_summary
from verl_mux.launcher.run_intervals import coordinators_lines
from verl_mux.launcher.run_summary import segment_steps
from verl_mux.profiling.eventlog import events

CONFIG = make_config(
    {
        "pools": {"rollout": {"nodes": [{"name": "r0"}]}, "train": {"nodes": [{"name": "t0"}, {"name": "t1"}]}},
        "schedule": [{"mode": "sequential", "steps": 3}, {"mode": "interleaved"}],
    }
)


@pytest.fixture
def result(tmp_path) -> dict:
    """Two jobs, three steps one after the other and four interleaved, on a rollout node and a training node."""
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
    return run_summary.summarise(run_intervals.read(tmp_path, ["a", "b", "ghost"]), CONFIG, ["a", "b", "ghost"], 7 << 30, 61.2345)


def test_figures_of_each_job(result):
    a, b = result["jobs"].values()  # the one that never finished a step is left out
    assert [(job["steps"], job["reward_first"], job["reward_last"]) for job in (a, b)] == [(7, 0.2, 0.6), (7, 0.0, 0.9)]
    # Neither the step behind the barrier, nor what ran after the first job ended.
    assert [(job["period_alone_s"], job["period_mux_s"]) for job in (a, b)] == [(10, 12), (12, 14)]
    # Medians over interleaved steps; engines that fall asleep at the same time count once.
    expected = {"rollout": 10, "train": 10, "sync": 2, "sleep": pytest.approx(0.7 + 0.3), "wake": 0}
    assert a["phase_s"] == {**expected, "wait_rollout": 3, "wait_train": 0.2}


def test_figures_of_all_jobs_together(result):
    mux = result["mux"]
    # (1/12 + 1/14) steps a second together; 2 steps in 10 + 12 seconds one after the other
    assert mux["throughput_ratio"] == pytest.approx((1 / 12 + 1 / 14) / (2 / 22), abs=1e-4)
    # alone: 2 x 100 + 2 x 200 tokens in 20 + 24 s; together: 300 tokens in 36 s beside 400 in 28 s
    assert mux["token_throughput_ratio"] == pytest.approx((300 / 36 + 400 / 28) / (600 / 44), abs=1e-4)
    # from 84 (b's first interleaved step has ended) to 116 (a's last): r0 runs 84-98 and 100-116, of t0 and t1 each 90-100
    assert mux["bubble"] == {"rollout": round(1 - 30 / 32, 4), "train": round(1 - 20 / 64, 4)}
    assert (mux["peak_rss_bytes"], mux["startup_s"]) == (7 << 30, 61.234)


def test_a_reward_that_was_no_number_is_left_out(tmp_path):
    made = MadeRun(tmp_path)
    made.steps("a", [10, 20, 30], tokens=100, rewards=[None, 0.2, 0.4])
    made.steps("b", [40], tokens=100, rewards=[None])
    jobs = run_summary.summarise(run_intervals.read(tmp_path, ["a", "b"]), CONFIG, ["a", "b"], 0, 0.0)["jobs"]
    assert [(job["reward_first"], job["reward_last"]) for job in jobs.values()] == [(0.3, 0.3), (0.0, 0.0)]


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


def test_the_time_between_an_end_and_a_resumption_is_no_step_and_no_idling(tmp_path):
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


class Predicted(MadeRun):
    def predicted(self, at, source, periods, group="g1", rollout="r0"):
        extra = {"group": group, "source": source, "periods": periods, "limits": {}, "order": "fifo"}
        self.coordinator(at, "group_predicted", **extra, nodes={"rollout": [rollout], "train": ["t0"]}, usd_per_hour=2.0)

    def steps(self, job, ends):
        for number, (start, end) in enumerate(zip(ends, ends[1:], strict=False), start=1):
            self.event(job, "step", number, start, end)


@pytest.fixture
def predicted_run(tmp_path):
    return Predicted(tmp_path)


def found(made, *jobs):
    predictions = coordinators_lines(made.directory, events.GROUP_PREDICTED)
    return run_summary.group_periods(predictions, run_intervals.read(made.directory, list(jobs)))


def test_a_groups_period_is_measured_from_its_prediction_on(predicted_run):
    predicted_run.steps("a", [0, 30, 41, 50, 60, 70, 80])
    predicted_run.steps("b", [0, 33, 44, 55, 64, 76])
    predicted_run.predicted(1, "estimated", {"a": 40.0, "b": 40.0})
    predicted_run.predicted(45, "observed", {"a": 11.0, "b": 11.0})
    (group,) = found(predicted_run, "a", "b")
    # a ends steps at 50, 60 and 70 (80 comes when b is through), b at 55, 64 and 76
    assert group["jobs"]["a"] == {"predicted_period_s": 11.0, "measured_period_s": 10.0, "steps": 2}
    assert group["jobs"]["b"] == {"predicted_period_s": 11.0, "measured_period_s": 10.5, "steps": 2}
    assert (group["predicted_period_s"], group["measured_period_s"], group["period_bound_s"]) == (11.0, 10.25, 40.0)
    assert group["difference"] == pytest.approx(11 / 10.25 - 1, abs=1e-4)


def test_the_same_jobs_on_other_nodes_are_another_group(predicted_run):
    predicted_run.steps("a", [0, 30, 60, 90, 120, 130, 140, 150, 160])
    predicted_run.predicted(1, "observed", {"a": 30.0}, rollout="r1")
    predicted_run.predicted(95, "estimated", {"a": 30.0})
    predicted_run.predicted(121, "observed", {"a": 11.0})
    apart, together = found(predicted_run, "a")
    assert (apart["measured_period_s"], together["measured_period_s"]) == (30.0, 10.0)
    assert together["nodes"] == {"rollout": ["r0"], "train": ["t0"]}


def test_a_group_ends_when_one_of_its_jobs_is_grouped_otherwise(predicted_run):
    predicted_run.steps("a", [0, 10, 20, 30, 40])
    predicted_run.steps("b", [0, 10, 20, 30, 40, 60, 80, 100, 120, 140])
    predicted_run.steps("c", [50, 80, 100, 120, 140])
    predicted_run.predicted(5, "observed", {"a": 10.0, "b": 10.0})
    predicted_run.predicted(42, "estimated", {"b": 15.0, "c": 15.0}, "g1")
    predicted_run.predicted(90, "observed", {"b": 20.0, "c": 20.0}, "g1")
    first, second = found(predicted_run, "a", "b", "c")
    assert list(first["jobs"]) == ["a", "b"] and first["jobs"]["b"]["steps"] == 3
    assert list(second["jobs"]) == ["b", "c"] and second["measured_period_s"] == 20.0


def test_a_job_alone_again_is_another_stay(predicted_run):
    predicted_run.steps("a", [0, 10, 20, 30, 50, 70, 90, 100, 110, 120])
    predicted_run.steps("b", [0, 50, 70, 90])
    predicted_run.predicted(5, "observed", {"a": 10.0})
    predicted_run.predicted(31, "estimated", {"a": 20.0, "b": 20.0})
    predicted_run.predicted(91, "estimated", {"a": 12.0})
    predicted_run.predicted(95, "observed", {"a": 9.0})
    stays = found(predicted_run, "a", "b")
    assert [(stay["predicted_period_s"], stay["measured_period_s"]) for stay in stays] == [(10.0, 10.0), (9.0, 10.0)]


def test_groups_with_too_few_steps_or_never_observed_are_left_out(predicted_run):
    predicted_run.steps("a", [0, 10, 20])
    predicted_run.predicted(5, "observed", {"a": 10.0})
    assert found(predicted_run, "a") == []
    predicted_run.predicted(1, "estimated", {"z": 10.0})
    assert found(predicted_run, "a", "z") == []
    assert run_summary.group_periods([], run_intervals.read(predicted_run.directory, ["a"])) == []


OLD, NEW = {"rollout": ["r0"], "train": ["t0"]}, {"rollout": ["r1"], "train": ["t0"]}


def asked_and_moved(run, asked, moved, number, done):
    about = {"job": "a", "number": number, "nodes": NEW, "before": OLD}
    run.coordinator(asked, "move_asked", **about, group="g1", expected_s=60.0)
    run.coordinator(moved, "job_moved", moved - asked, **about, done=done)


def moves(run):
    return run_summary.read_moves(run.directory, run_intervals.read(run.directory, ["a"]))


def test_a_move_is_told_with_what_it_took_and_the_rewards_on_both_sides_of_it(tmp_path):
    run = MadeRun(tmp_path)
    run.steps("a", [10, 20, 30, 90, 100], rewards=[0.1, 0.2, 0.3, 0.5, None])
    asked_and_moved(run, 25, 80, number=4, done=3)
    run.coordinator(85, "move_asked", job="a", number=5, nodes=OLD, before=NEW, group="g1", expected_s=55.0)  # not over yet
    (move,) = moves(run)
    assert (move["job"], move["from"], move["to"], move["after_step"]) == ("a", OLD, NEW, 3)
    assert (move["took_s"], move["expected_s"]) == (55.0, 60.0)
    assert (move["steps_lost"], move["steps_doubled"], move["reward_before"], move["reward_after"]) == (0, 0, 0.2, 0.5)
    sentence = "moved a after step 3 from r0, t0 to r1, t0 in 55 s (60 expected); steps lost 0, doubled 0; reward 0.20->0.50"
    assert run_summary.move_sentence(move) == sentence


def test_a_step_that_was_done_twice_or_never_is_counted(tmp_path):
    run = MadeRun(tmp_path)
    run.steps("a", [10, 20, 30])
    run.event("a", "step", 3, 80, 90)
    run.event("a", "step", 5, 100, 110)
    asked_and_moved(run, 25, 80, number=1, done=3)
    (move,) = moves(run)
    assert (move["steps_lost"], move["steps_doubled"], move["reward_after"]) == (1, 1, None)
