"""Why a job does not go elsewhere, and why it is where it is."""

import msgspec

from tests.placement.made_jobs import EITHER, Planner, make_cluster, make_job
from verl_mux.placement.explain import alternatives, lost_to, where
from verl_mux.placement.model import Estimate, Rules
from verl_mux.placement.questions import Arrive


def reasons(placer, job) -> list[str]:
    return [alternative.why for alternative in alternatives(placer.placer, job)]


def test_each_kind_of_refusal_has_its_words():
    placer = Planner.of_one(make_cluster(2, 2), Rules(cap=2, rollout_scaling=False, training_scaling=False))
    placer.admit(make_job("a", 100, 100, slo=1.2, rollout_memory_gb=700))
    assert "900 GB" in reasons(placer, make_job("m", 100, 100, slo=1.2, rollout_memory_gb=900))[0]
    assert "busy for at least" in reasons(placer, make_job("s", 300, 30, slo=1.0))[0]
    placer.admit(make_job("b", 100, 100, slo=1.2, rollout_memory_gb=10))
    found = reasons(placer, make_job("c", 10, 10, rollout_nodes=2, train_nodes=2))
    assert found == ["full: 2 jobs, the cap", "needs 2 + 2 nodes; free are 1 + 1"]


def test_a_place_that_would_break_an_slo_names_whose():
    placer = Planner.of_one(make_cluster(), Rules(rollout_scaling=False, training_scaling=False))
    placer.admit(make_job("long", 200, 200, slo=1.0))
    why = reasons(placer, make_job("short", 30, 30, slo=1.5))[0]
    assert why.startswith("short would take") and "its SLO allows 90 s" in why


def test_what_could_have_been_taken_lost_by_its_price():
    placer = Planner.of_one(make_cluster())
    placer.admit(make_job("a", 100, 100, slo=1.3))
    found = alternatives(placer.placer, make_job("b", 100, 100, slo=1.3))
    assert [alternative.why for alternative in found] == ["", ""]
    assert lost_to(placer.admit(make_job("b", 100, 100, slo=1.3)), found)[-1].why == "costs 57.04 USD/h more"


def test_nodes_of_its_own_are_told_for_each_mode():
    placer = Planner.of_one(make_cluster(1, 2))
    placer.admit(make_job("a", 100, 100, slo=1.0))
    found = alternatives(placer.placer, make_job("b", 100, 100, slo=1.0, modes=EITHER))
    assert [(place.strategy, place.why) for place in found[1:]] == [
        ("isolated", "needs 1 + 1 nodes; free are 0 + 1"),
        ("colocated", ""),
    ]


def sentence(placer, job):
    return placer.answer(Arrive(job), {}, explained=None).because


def test_where_it_is():
    assert where("a", ["r0", "t0", "r0"], {"r0": ["c"], "t0": ["b", "c"]}) == "a shares r0, t0 with b, c"
    assert where("a", ["r0", "t0"], {"t0": ["b"], "r0": []}) == "a shares t0 with b and has r0 to itself"
    assert where("a", ["t0"], {}) == "a has t0 to itself"


def test_the_first_has_nobody_to_share_with():
    said = sentence(Planner.of_one(make_cluster()), make_job("a", 100, 100, modes=EITHER))
    assert (
        said
        == "which added 42.24 USD/h, as there was no job yet to share with; on nodes of its own it would have cost 57.04 USD/h"
    )


def test_who_shares_is_told_what_nodes_of_its_own_would_have_cost():
    placer = Planner.of_one(make_cluster())
    placer.admit(make_job("a", 100, 100, slo=1.3))
    said = sentence(placer, make_job("b", 100, 100, slo=1.3))
    assert said == "which added 0.00 USD/h, and no other place added less; on nodes of its own it would have cost 57.04 USD/h"


def test_a_job_alone_says_why_and_one_that_waits_too():
    placer = Planner.of_one(make_cluster(), Rules(rollout_scaling=False, training_scaling=False))
    placer.admit(make_job("a", 100, 100, slo=2.0))
    assert sentence(placer, make_job("b", 300, 30, slo=1.0)) == (
        "which added 57.04 USD/h, as group g1 could not take it: every rollout node is busy for at least 25% of the time and the"
        " job needs 91%, and no allowed way to share its train nodes"
    )
    placer = Planner.of_one(make_cluster(1, 1))
    placer.admit(make_job("a", 100, 100, slo=1.2))
    assert sentence(placer, make_job("b", 300, 300, slo=1.0)) == "no room within everybody's SLO"


def test_who_was_placed_by_bounds_is_told_to_measure():
    placer = Planner.of_one(make_cluster())
    placer.admit(make_job("a", 100, 100, slo=1.3))
    bound = Estimate(seconds=100.0, source="bound")
    said = sentence(placer, msgspec.structs.replace(make_job("b", 100, 100, slo=1.3), rollout=bound))
    assert said.endswith("tell the seconds of a few steps (mux.profiled)")
