"""`verl-mux plan`: a sentence a job."""

from pathlib import Path

from verl_mux.launcher.plan.jobs_file import read_jobs
from verl_mux.launcher.plan.places import lines, make_plan

EXAMPLE = Path(__file__).parents[3] / "examples" / "placement" / "jobs.yaml"


def test_each_job_is_told_in_a_sentence_where_it_is_and_why():
    found = make_plan(read_jobs(EXAMPLE))
    said = {job["job"]: job["why"] for job in found["jobs"]}
    assert said["code-7b"] == (
        "code-7b shares rollout-0, train-0 with agent-14b, math-7b, which added 0.00 USD/h, and no other place added less;"
        " on nodes of its own it would have cost 57.04 USD/h"
    )
    assert said["tools-8b"].startswith(
        "tools-8b has rollout-2, train-1 to itself, which added 57.04 USD/h, as group g1 could not"
    )
    assert said["tools-8b"].endswith("to save 14.80 USD/h, run both phases on the same training nodes (mux_colocate)")
    assert all(f"    {sentence}" in lines(found) for sentence in said.values())


def test_who_waits_is_told_why(tmp_path):
    file = tmp_path / "jobs.yaml"
    file.write_text(
        "pools: {rollout: {nodes: 1}, train: {nodes: 1}}\n"
        "jobs: [{name: a, rollout_s: 100, train_s: 100, slo: 1}, {name: b, rollout_s: 300, train_s: 30, slo: 1}]\n"
    )
    assert make_plan(read_jobs(file))["jobs"][1]["why"] == "b waits: no room within everybody's SLO"
