"""Runs at the rate of settled periods, held against those that are carried out phase by phase."""

import pytest

from tests.scheduling.made_jobs import make_cluster, make_job
from verl_mux.scheduling.placer.placer import Placer
from verl_mux.scheduling.search.rules import Rules
from verl_mux.simulation.fluid import colocated, run_fluid
from verl_mux.simulation.replay import Replay
from verl_mux.simulation.workload.noise import Varying, with_varying_phases
from verl_mux.simulation.workload.workload import Arrival


def test_phases_that_vary_and_grow_take_a_colocated_job_as_long_as_one_alone():
    cluster = make_cluster()
    steady = [Arrival(make_job("a", 60, 40, sync_s=1), 3600.0, 400), Arrival(make_job("b", 30, 70), 0.0, 200)]
    varying = with_varying_phases(steady, Varying(0.1, 2.0), 0)
    alone = {job.job: job for job in Replay(varying, Placer(cluster, Rules(cap=1)), cluster).run().finished}
    for job in run_fluid(varying, colocated(cluster)).finished:
        assert job.solo_s == pytest.approx(alone[job.job].solo_s) and job.solo_s > 1.2 * job.planned_solo_s
        assert job.ended_s - job.placed_s == pytest.approx(job.solo_s)
