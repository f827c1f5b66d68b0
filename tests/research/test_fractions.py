"""Jobs on parts of nodes."""

import msgspec
import pytest

from research.fluid import gavel, ideal, own_split
from research.simulate import Study, simulate
from research.workload.varying import Varying
from research.workload.workload import TraceRow, find_shapes
from tests.placement.made_jobs import CHEAP, EITHER, make_cluster, make_job
from verl_mux.placement.model import TESTBED
from verl_mux.placement.rules import OURS, PAPER

USD = 14.8, 42.24


def iteration(job, rollout, train):
    return job.rollout_nodes * job.rollout.seconds / rollout + job.train_nodes * job.train.seconds / train


@pytest.mark.parametrize(("seconds", "nodes"), [((315, 121), (1, 1)), ((268, 362), (2, 2)), ((50, 200), (1, 2))])
def test_the_split_of_gavel_is_as_fast_as_the_job_alone_and_no_other_is_cheaper(seconds, nodes):
    job = make_job("a", *seconds, rollout_nodes=nodes[0], train_nodes=nodes[1])
    rollout, train = own_split(job, USD)
    cost = rollout * USD[0] + train * USD[1]
    assert iteration(job, rollout, train) == pytest.approx(sum(seconds))
    for by in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        left = sum(seconds) - nodes[0] * seconds[0] / (rollout * by)  # seconds for the training, if any
        assert left <= 0 or rollout * by * USD[0] + nodes[1] * seconds[1] / left * USD[1] > cost


def test_under_gavel_a_job_of_long_rollouts_holds_more_of_the_cheap_nodes_and_part_of_a_dear_one():
    held = gavel(make_cluster())({"a": make_job("a", 315, 121, sync_s=1), "b": make_job("b", 315, 121, sync_s=1)})
    assert held.nodes[0] > 2 > held.nodes[1] and held.usd_per_hour < 2 * 57.04
    assert held.usd_per_hour == pytest.approx(held.nodes[0] * 14.8 + held.nodes[1] * 42.24)
    assert held.periods == {"a": 437, "b": 437}
    assert sum(busy / nodes for busy, nodes in zip(held.busy, held.nodes, strict=True)) == pytest.approx(1.0)  # one at a time


def test_the_bound_is_what_the_phases_alone_would_cost():
    jobs = {"a": make_job("a", 60, 40, sync_s=20), "b": make_job("b", 60, 60, rollout_nodes=2, train_nodes=3)}
    held = ideal(make_cluster(), OURS)(jobs)
    assert held.nodes == held.busy == pytest.approx((80 / 120 + 2 * 60 / 120, 40 / 120 + 3 * 60 / 120))
    assert held.usd_per_hour == pytest.approx(held.nodes[0] * 14.8 + held.nodes[1] * 42.24)


def test_the_bound_counts_a_job_in_the_mode_in_which_its_phases_cost_the_least():
    job = make_job("a", 60, 60, rollout_nodes=4, train_nodes=4, modes=EITHER)
    dear = make_cluster()
    cheap = msgspec.structs.replace(CHEAP, usd_per_gpu_hour=1.0)
    cheaper = msgspec.structs.replace(dear, train=msgspec.structs.replace(dear.train, kind=cheap))
    assert ideal(dear, OURS)({"a": job}).nodes == (2, 2)
    assert ideal(cheaper, OURS)({"a": job}).nodes == (0, 4)
    assert ideal(cheaper, PAPER)({"a": job}).nodes == (2, 2)  # whose rules know no colocated places


def test_no_policy_costs_less_than_the_bound_while_phases_vary_and_grow():
    names = ("ideal", "live", "ours", "rollmux", "colocated", "gavel", "random", "most-idle")
    study = Study(
        rows=[TraceRow(f"job{i}", i * 0.5, 2.0 + i % 3) for i in range(8)], shapes=find_shapes("mixed"), slo=(2.0, 2.0),
        policies=names, cluster=TESTBED, rules=OURS, varying=Varying(0.1, 2.0), movable=True, seeds=2, max_optimum_jobs=0,
    )  # fmt: skip
    found = {name: each["usd_per_hour_mean"] for name, each in simulate(study).report["policies"].items()}
    assert min(found, key=found.__getitem__) == "ideal"
