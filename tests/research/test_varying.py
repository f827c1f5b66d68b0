"""Traces and shapes of a user's own; phases that vary and grow."""

import itertools
import random
from statistics import fmean

import pytest

from research.command import parse_rules
from research.outcome import assess
from research.replay import Replay
from research.workload.varying import lengths_by_workload, parse_estimates, upper_quantile, with_real_lengths, with_said_lengths
from research.workload.workload import SHAPE_COLUMNS, Arrival, TraceRow, draw_workload, find_shapes, parse_slo, read_trace
from tests.placement.made_jobs import make_job
from verl_mux.errors import UserError
from verl_mux.placement.model import TESTBED, Rules
from verl_mux.placement.planner import Planner


def test_rows_come_in_order_of_arrival_with_or_without_gpus(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("job,arrival_h,duration_h,note,gpus\nb,2,1,x,16\na,1,1,y,\n")
    rows = read_trace(path)
    assert [(row.job, row.gpus) for row in rows] == [("a", None), ("b", 16)]
    jobs = [arrival.job for arrival in draw_workload(rows, find_shapes("balanced"), (1.5, 1.5), seed=0)]
    assert jobs[1].rollout_nodes == jobs[1].train_nodes == 2 and jobs[0].slo == 1.5


@pytest.mark.parametrize(("spec", "found"), [("uniform:1,2", (1, 2)), ("1.5", (1.5, 1.5))])
def test_an_slo_is_a_number_or_a_range(spec, found):
    assert parse_slo(spec) == found


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("huge,1,2,3,4", "line 2: size is 'huge'; allowed: small, medium, large"),
        ("small,2,1,3,4", "no minimum above its maximum"),
        ("small,1,2,3", "line 2: a shape needs"),
        ("small,1,inf,3,4", "above 0 and finite"),
        ("small,nan,2,3,4", "above 0"),
        ("\udc96\udcff", "is not a CSV file"),
    ],
)
def test_a_shape_of_ones_own(tmp_path, row, words):
    path = tmp_path / "shapes.csv"
    path.write_text(",".join(SHAPE_COLUMNS) + "\nsmall,1,2,3,4\n")
    (shape,) = find_shapes(str(path))
    assert (shape.size, shape.rollout, shape.train) == ("small", (1, 2), (3, 4))
    path.write_text(",".join(SHAPE_COLUMNS) + f"\n{row}\n", encoding="utf-8", errors="surrogateescape")
    with pytest.raises(UserError, match=words):
        find_shapes(str(path))


def test_rules_are_changed_by_name():
    rules = parse_rules(3, ["repack=off", "reach=6", "keep=0.5"])
    assert (rules.cap, rules.repack, rules.reach, rules.keep) == (3, False, 6, 0.5)


ARRIVALS = [Arrival(make_job(f"j{i}", 60, 40), 60.0 * i, 100) for i in range(2000)]


@pytest.mark.parametrize("stop_early", [0.0, 0.3, 1.0])
def test_jobs_that_end_early_had_said_more_and_end_anywhere_on_the_way(stop_early):
    said = with_said_lengths(ARRIVALS, stop_early, seed=1)
    assert all(each.says >= each.iterations for each in said)
    early = [each.iterations / each.says for each in said if each.says > each.iterations]
    assert len(early) / len(said) == pytest.approx(stop_early, abs=0.03)
    if early:
        assert sum(early) / len(early) == pytest.approx(0.5, abs=0.03)


def test_what_is_left_is_what_was_said_without_what_is_done():
    (one, *_), (other, *_) = (with_said_lengths(ARRIVALS[:1], 0.0, seed) for seed in (1, 2))
    assert one == other and (one.says_left(0), one.says_left(97), one.says_left(120)) == (100, 3, 0)
    assert ARRIVALS[0].says_left(5) is None


ROWS = [TraceRow(f"job{i}", float(i), 5.0) for i in range(10)]
EXACT_JOBS = draw_workload(ROWS, find_shapes("mixed"), (1.0, 2.0), seed=0)


def test_batches_have_the_means_they_are_measured_in_and_no_bound_is_passed():
    for lengths in lengths_by_workload().values():
        rollouts, trains = zip(*lengths.batches, strict=True)
        assert fmean(rollouts) == pytest.approx(1) and fmean(trains) == pytest.approx(1)
        assert max(rollouts) <= lengths.bound[0] and max(trains) <= lengths.bound[1]
        assert 3 < lengths.bound[1] < 8


@pytest.mark.parametrize("spec", ["bound", "mean", "quantile:0.9"])
def test_real_phases_are_the_same_whatever_is_estimated(spec):
    one, other = (with_real_lengths(EXACT_JOBS, parse_estimates(kind), seed=3) for kind in (spec, "mean"))
    for a, b, exact in zip(one, other, EXACT_JOBS, strict=True):
        drawn = list(itertools.islice(a.draws(), 200))
        assert drawn == list(itertools.islice(b.draws(), 200))
        assert fmean(train for _, train in drawn) == pytest.approx(exact.job.train.seconds, rel=0.05)


def test_bounds_raise_what_the_slo_counts_from_and_quantiles_do_not():
    bound, quantile = (with_real_lengths(EXACT_JOBS, parse_estimates(kind), seed=3) for kind in ("bound", "quantile:0.9"))
    for a, b, exact in zip(bound, quantile, EXACT_JOBS, strict=True):
        assert a.job.limit_s > 1.3 * exact.job.limit_s
        assert b.job.limit_s == pytest.approx(exact.job.limit_s, rel=0.05)
        assert exact.job.train.seconds * 0.97 < b.job.train.seconds < a.job.train.seconds


def test_jobs_alone_cost_the_same_whatever_is_estimated():
    def usd_per_hour(spec: str) -> float:
        arrivals = with_real_lengths(EXACT_JOBS, parse_estimates(spec), seed=3)
        return assess(Replay(arrivals, Planner.of_one(TESTBED, Rules(cap=1)), TESTBED).run(), TESTBED, {}, None).usd_per_hour_mean

    assert usd_per_hour("bound") == pytest.approx(usd_per_hour("mean"))


def test_the_upper_bound_of_a_quantile_holds_as_often_as_it_promises():
    rng = random.Random(0)
    held = sum(upper_quantile([rng.random() for _ in range(60)], 0.8) >= 0.8 for _ in range(2000))
    assert held / 2000 >= 0.94
    assert upper_quantile([1.0, 2.0], 0.9) == 2.0
