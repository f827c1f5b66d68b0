"""The figures of the paper, and migrations planned ahead."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from research.paper import others, schedules, tails
from research.paper.__main__ import CLAIMS, find_claims
from research.paper.figure import Figure, markdown
from research.paper.tails import Tail, plan_tails, with_best_tails, with_tail
from research.workload.varying import read_lengths
from tests.placement.made_jobs import make_job
from verl_mux.errors import UserError
from verl_mux.placement.group_run import group_periods
from verl_mux.rollout.control.replica_plan import EngineSpeed

ROOT = Path(__file__).parents[2]


def run(*arguments):
    command = [sys.executable, "-m", "research.paper", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)


@pytest.mark.parametrize("claim", ["R1", "R2", "R6"])
def test_what_is_promised_is_within_its_bound(claim):
    figures = CLAIMS[claim].run()
    promised = [figure for figure in figures if figure.within is not None]
    assert len(promised) == {"R1": 8, "R2": 1, "R6": 12}[claim]
    assert [figure.name for figure in promised if not figure.met] == []


def test_the_cost_efficiency_of_the_third_panel_depends_on_what_alone_means():
    """Table 3 gives a D job 8 H800, section 7.2 gives it 16: only with the latter is the printed figure reached."""
    by_name = {figure.name: figure for figure in schedules.cost_efficiency()}
    assert len(by_name) == 4
    assert [name for name, figure in by_name.items() if not figure.met] == ["fig. 10c cost efficiency over solo"]


def test_cold_starts_cost_a_fifth_to_a_third_of_the_throughput():
    lost = [figure.ours for figure in schedules.cold_starts()]
    assert lost[0] == max(lost) and all(15 < share < 45 for share in lost)


def test_without_switches_and_syncs_the_longest_iteration_sets_the_period_of_figure_10c():
    periods = group_periods(schedules.CASES["c"].group(free=True))
    longest = max(job.iteration_s for job in schedules.CASES["c"].group(free=True).jobs)
    assert all(period == pytest.approx(longest) for period in periods.values())


def test_theorem_1_holds_on_one_node_and_not_on_two():
    none, worst, example = others.violations(1, groups=300)
    assert (none, worst, example) == (0, 1.0, "")
    some, worst, example = others.violations(2, groups=300)
    assert some > 0 and 1 < worst < 2 and "on r1" in example and "on r2" in example


def test_a_figure_knows_its_difference_and_whether_that_will_do():
    figure = Figure(claim="R1", name="x", paper=100.0, ours=104.0, unit="s", within=0.05)
    assert figure.difference == pytest.approx(0.04) and figure.met
    assert Figure(claim="R1", name="x", paper=None, ours=1.0).difference is None
    assert Figure(claim="R1", name="x", paper=0.0, ours=3.0, within=0.1).met is None
    row = figure.as_row()
    assert row["met"] is True and row["difference"] == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("fields", "tag"),
    [
        ({"ours": 109.0}, "reproduced"),
        ({"ours": 111.0}, "missed"),
        ({"ours": 109.0, "within": 0.05}, "missed"),
        ({"ours": 109.0, "basis": "assumed"}, "assumed"),
        ({"ours": 89.0, "basis": "assumed"}, "missed"),
        ({"ours": 300.0, "basis": "fitted"}, "fitted"),
        ({"ours": 1.0, "at_most": True}, "reproduced"),
        ({"ours": 111.0, "at_most": True}, "missed"),
        ({"ours": None}, ""),
        ({"ours": 1.0, "paper": 0.0}, "missed"),
        ({"ours": 0.0, "paper": 0.0}, "reproduced"),
        ({"ours": 1.0, "paper": None}, ""),
    ],
)
def test_a_figure_is_tagged_by_what_it_shows(fields, tag):
    figure = Figure(**{"claim": "R1", "name": "x", "paper": 100.0, **fields})
    assert figure.tag == figure.as_row()["tag"] == tag


def test_gavel_comes_near_the_papers_in_all_three_panels_and_table_4_contradicts_figure_10():
    assert [figure.tag for figure in others.other_systems() if "Gavel+" in figure.name] == ["assumed"] * 3
    rollmux = [figure for figure in others.interference() if figure.name.endswith("RollMux")]
    assert [figure.tag for figure in rollmux] == ["missed", "reproduced", "missed"]
    for figure in rollmux:  # the paper's own bars are nearer to ours than its table is, or as near
        assert float(figure.remark.rpartition(" ")[2]) == pytest.approx(figure.ours, abs=0.05)


def test_what_was_fitted_is_called_so():
    figures = others.syncs()
    tags = [figure.tag for figure in figures]
    assert tags[:12] == ["fitted"] * 12 and (tags[12:].count("reproduced"), tags[12:].count("missed")) == (7, 1)
    assert not any("14B," in figure.name for figure in figures[12:])  # those they come from


def test_the_table_holds_every_figure():
    figures = [
        Figure(claim="R1", name="x", paper=100.0, ours=110.0, unit="s", within=0.05),
        Figure(claim="R2", name="y", paper=None, ours=2.0),
    ]
    assert markdown(figures).splitlines()[2] == "| R1 | x | 100 s | 110 s | +10.0% (beyond 5%) | missed |  |"
    assert markdown(figures).splitlines()[3] == "| R2 | y | - | 2 |  |  |  |"


def test_claims_are_chosen_by_name():
    assert find_claims("") == list(CLAIMS) and find_claims("r6, R1") == ["R6", "R1"]
    with pytest.raises(UserError, match="claim 'R16' is not known; allowed: R1"):
        find_claims("R16")


def test_the_command_prints_json():
    result = run("--only", "R1,R6", "--json")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)["figures"]
    assert {figure["claim"] for figure in figures} == {"R1", "R6"}


def test_an_unknown_claim_ends_with_one_line_and_exit_code_2():
    result = run("--only", "R0")
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and "'R0'" in result.stderr


def test_drawn_lengths_follow_the_distribution_they_are_drawn_from():
    drawn = tails.draw_lengths("7B-4k", 4000, random.Random(1))
    assert min(drawn) >= 1 and max(drawn) <= read_lengths()["7B-4k"][-1][1]
    assert sorted(drawn)[2000] == pytest.approx(718, rel=0.1)  # the median that was read off the figure


def test_migration_gains_what_the_page_says():
    assert [figure.ours for figure in tails.migrations()] == pytest.approx([1.00, 1.02, 1.17, 1.07], abs=0.005)


LONG_TAIL = [100] * 36 + [1000] * 4


def planned(prefill, engines=4):
    """A token of every request takes a hundredth of a second, however many run."""
    return list(plan_tails(LONG_TAIL, engines, EngineSpeed(prefill, 0.01, 0.0), (0.8,)))


def test_a_long_tail_is_gathered_and_most_nodes_are_freed():
    """The short ones end at 1 s; the long ones, one an engine, go on to 10 s, then on one engine as fast as on four."""
    (found,) = planned(prefill=1e6)
    assert found.rollout == pytest.approx(1.0, abs=0.001) and found.freed == pytest.approx(0.9 * 3 / 4, abs=0.001)
    (dear,) = planned(prefill=300.0)
    assert dear.rollout > found.rollout, "prefilling again is paid for"


@pytest.mark.parametrize("given", [{"prefill": 10.0}, {"prefill": 1e6, "engines": 1}])
def test_where_moving_costs_more_than_it_frees_or_there_is_nowhere_to_gather_nothing_is_planned(given):
    assert planned(**given) == []


@given(st.lists(st.integers(1, 2000), min_size=8, max_size=60), st.integers(2, 6), st.floats(0.0, 0.001))
def test_a_plan_is_sound_for_any_lengths(lengths, engines, per_request):
    for found in plan_tails(lengths, engines, EngineSpeed(5e3, 0.01, per_request), (0.5, 0.8, 0.95)):
        assert found.rollout >= 1 - 1e-9 and 0 < found.freed < found.rollout


GOOD, LONGER = Tail(rollout=1.0, freed=0.45), Tail(rollout=1.5, freed=0.6)


def test_a_job_with_a_tail_gives_its_nodes_away_for_the_freed_share():
    job = make_job("a", 100, 40)
    migrated = with_tail(job, LONGER)
    assert (migrated.rollout.seconds, migrated.tail_s) == (150, 60)
    assert migrated.limit_s == job.limit_s  # what the SLO counts is the job as it was


@pytest.mark.parametrize(
    ("phases", "slo", "movable", "tails_s", "period_s"),
    [
        (((100, 40), (100, 40)), 2.0, "ab", [45, 45], 140),  # 200 s before, as each waits for the other's rollouts
        (((50, 100), (50, 100)), 2.0, "ab", [0, 0], 200),  # training is what they wait for
        (((40, 20), (100, 20)), 2.0, "b", [0, 45], 155),  # in which a takes two turns
        (((40, 20), (100, 20)), 1.2, "b", [0, 0], 140),  # no job is brought beyond its SLO, 144 s
    ],
)
def test_jobs_migrate_in_the_way_that_serves_both(phases, slo, movable, tails_s, period_s):
    jobs = [make_job(name, *seconds, slo=slo) for name, seconds in zip("ab", phases, strict=True)]
    before = schedules.grouped({job.name: (job, ("r0",), ("t0",)) for job in jobs})
    after = with_best_tails(before, {name: [LONGER, GOOD] for name in movable})
    assert [job.tail_s for job in after.jobs] == tails_s and group_periods(after)["b"] == pytest.approx(period_s)
