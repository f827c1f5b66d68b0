"""The figures of a run: its steps, its groups' periods as predicted and as measured, its moves, its picture."""

import json
from datetime import timedelta

import pytest

from tests.launcher.made_run import ORIGIN, MadeRun
from verl_mux.coordinator.config import make_config
from verl_mux.launcher import run_intervals, run_summary
from verl_mux.launcher.run_intervals import Span, Timeline
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
        extra |= {"nodes": {"rollout": [rollout], "train": ["t0"]}, "usd_per_hour": 2.0}
        line = {"timestamp": (ORIGIN + timedelta(seconds=at)).isoformat(), "event": "group_predicted", "extra": extra}
        path = self.directory / "coordinator" / "events" / "coordinator" / "step_0" / "worker_0.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def steps(self, job, ends):
        for number, (start, end) in enumerate(zip(ends, ends[1:], strict=False), start=1):
            self.event(job, "step", number, start, end)


@pytest.fixture
def predicted_run(tmp_path):
    return Predicted(tmp_path)


def found(made, *jobs):
    predictions = run_summary.read_predictions(made.directory)
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


def test_a_torn_line_is_passed_over(predicted_run):
    predicted_run.predicted(1, "observed", {"a": 1.0})
    path = next(predicted_run.directory.rglob("worker_0.jsonl"))
    path.write_text(path.read_text() + '{"event": "group_predicted", "extr')
    assert len(run_summary.read_predictions(predicted_run.directory)) == 1


OLD, NEW = {"rollout": ["r0"], "train": ["t0"]}, {"rollout": ["r1"], "train": ["t0"]}


def logged(run, at, event, duration=None, **extra):
    line = {"timestamp": (ORIGIN + timedelta(seconds=at)).isoformat(), "event": event, "extra": extra, "workid": 0, "step": 0}
    line |= {"duration_sec": duration} if duration is not None else {}
    run.raw("coordinator", "coordinator", 0, 0, json.dumps(line))


def asked_and_moved(run, asked, moved, number, done):
    logged(run, asked, "move_asked", job="a", number=number, nodes=NEW, before=OLD, group="g1", expected_s=60.0)
    logged(run, moved, "job_moved", moved - asked, job="a", number=number, nodes=NEW, before=OLD, done=done)


def moves(run):
    return run_summary.read_moves(run.directory, run_intervals.read(run.directory, ["a"]))


def test_a_move_is_told_with_what_it_took_and_the_rewards_on_both_sides_of_it(tmp_path):
    run = MadeRun(tmp_path)
    run.steps("a", [10, 20, 30, 90, 100], rewards=[0.1, 0.2, 0.3, 0.5, None])
    asked_and_moved(run, 25, 80, number=4, done=3)
    logged(run, 85, "move_asked", job="a", number=5, nodes=OLD, before=NEW, group="g1", expected_s=55.0)  # not over yet
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


def test_a_run_without_moves_has_none(tmp_path):
    run = MadeRun(tmp_path)
    run.steps("a", [10, 20])
    assert moves(run) == []


def drawn(spans: list[Span], tmp_path, monkeypatch):
    """The axes, and the picture on disk."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    config = make_config({"pools": {"rollout": {"nodes": [{"name": "r0"}]}, "train": {"nodes": [{"name": "t0"}]}}})
    run_summary.draw(Timeline(spans, [], [], []), config, ["a", "b"], tmp_path / "lanes.png")
    assert (tmp_path / "lanes.png").stat().st_size > 0
    return figures[0].axes[0]


def spans(steps: int) -> list[Span]:
    return [
        Span(job, "rollout", step, 20 * step + at, 20 * step + at + 9, (node,))
        for step in range(1, steps + 1)
        for at, job, node in ((0, "a", "r0"), (10, "b", "r0"), (10, "a", "t0"))
    ]


def test_spans_that_are_wide_enough_have_their_steps_number(tmp_path, monkeypatch):
    texts = [text.get_text() for text in drawn(spans(3), tmp_path, monkeypatch).texts]
    assert sorted(filter(str.isdigit, texts)) == sorted(3 * ["1", "2", "3"])


def test_a_run_of_weeks_is_drawn_with_a_shape_for_each_job_and_node(tmp_path, monkeypatch):
    axes = drawn(spans(1000), tmp_path, monkeypatch)
    assert len(axes.collections) == 3 and not axes.patches
    assert not any(text.get_text().isdigit() for text in axes.texts)
