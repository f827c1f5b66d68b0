"""Why a job does not go elsewhere."""

from tests.placement.made_jobs import EITHER, make_cluster, make_job
from verl_mux.placement.explain import alternatives, lost_to
from verl_mux.placement.planner import Planner
from verl_mux.placement.rules import Rules


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
