"""`verl-mux simulate` and `verl-mux plan` as a user meets them, and comparisons in one process and in several."""

import functools
import json
import os

import pytest

from research.simulate import Study, in_processes, simulate
from research.workload.varying import Varying
from research.workload.workload import TraceRow, find_shapes
from verl_mux.errors import Failure, UserError
from verl_mux.placement.model import OURS, TESTBED

HEAD = "job,arrival_h,duration_h,gpus\n"
JOB = "jobs: [{name: a, rollout_s: 10, train_s: 10}]\n"


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    rows = [f"job{i},{i * 0.3:.2f},{0.2 + i % 3 / 2},{8 + 8 * (i % 2)}" for i in range(12)]
    path.write_text(HEAD + "\n".join(rows) + "\n")
    return path


def test_all_policies_side_by_side_and_the_same_bytes_in_one_process_and_in_three(run_main, trace, tmp_path):
    arguments = ("simulate", trace, "--shapes", "mixed", "--seeds", 2, "--max-jobs", 6, "--json")
    code, out, err = run_main(*arguments, "--processes", 1)
    assert code == 0 and run_main(*arguments, "--processes", 3)[1] == out
    report = json.loads(out)
    assert (report["seeds"], report["jobs"]) == (2, 12)
    names = ["live", "solo", "colocated", "gavel", "random", "most-idle", "rollmux", "ours", "optimum", "ideal"]
    assert list(report["policies"]) == names
    for found in report["policies"].values():
        keys = {
            "usd_per_hour_mean",
            "usd_per_hour_peak",
            "slo_attainment",
            "slo_attainment_real",
            "cost_over_optimum_mean",
            "idle",
        }
        assert keys < set(found) and set(found["idle"]) == {"rollout", "train"}
    solo, ours, optimum = (report["policies"][name] for name in ("solo", "ours", "optimum"))
    assert optimum["usd_per_hour_mean"] <= ours["usd_per_hour_mean"] <= solo["usd_per_hour_mean"]
    assert ours["slo_attainment"] == ours["slo_attainment_real"] == 1.0
    assert 1.0 <= optimum["cost_over_optimum_mean"] <= ours["cost_over_optimum_mean"]  # of the moment, by the hour
    gavel, live = (report["policies"][name] for name in ("gavel", "live"))
    ideal = report["policies"]["ideal"]
    assert all(
        ideal["usd_per_hour_mean"] < found["usd_per_hour_mean"] for found in report["policies"].values() if found is not ideal
    )
    assert ideal["idle"] == {"rollout": 0.0, "train": 0.0} and ideal["cost_over_optimum_mean"] is None
    assert gavel["usd_per_hour_mean"] < solo["usd_per_hour_mean"] and gavel["slo_attainment_real"] == 1.0
    assert live["moves_mean"] == live["lost_work_h"] == 0 < live["profile_s_mean"]  # no job can be moved, and profiling costs
    assert live["usd_per_hour_mean"] > optimum["usd_per_hour_mean"]


def test_colocated_places_are_a_rule_that_saves_those_who_know_it(run_main, trace):
    run = ("simulate", trace, "--policies", "live,ours,solo,rollmux", "--max-jobs", 0, "--json")
    two_pools, more = (json.loads(run_main(*run, *off)[1])["policies"] for off in (("--rule", "colocate=off"), ()))
    for name in ("live", "ours"):
        assert more[name]["usd_per_hour_mean"] < two_pools[name]["usd_per_hour_mean"]
        assert more[name]["peak_gpus"]["rollout"] < more[name]["peak_gpus"]["train"]
        assert 0 <= more[name]["idle"]["train"] < 1 and more[name]["slo_attainment_real"] == 1.0
    assert (more["solo"], more["rollmux"]) == (two_pools["solo"], two_pools["rollmux"])


def test_the_papers_rules_can_be_switched_and_are_all_together_its_algorithm_1(run_main, trace):
    off = [f"{name}=off" for name in ("training_scaling", "colocate", "best_fit", "guard", "repack")]
    run = ("simulate", trace, "--policies", "ours,rollmux", "--max-jobs", 0, "--json")
    rules = off, [*off, "whole_pool=on", "prune_saturated=on"]
    neither, both = (
        json.loads(run_main(*run, *(word for rule in on for word in ("--rule", rule)))[1])["policies"] for on in rules
    )
    assert both["ours"] == both["rollmux"] == neither["rollmux"] != neither["ours"]


def test_with_noise_and_drift_live_pays_for_its_moves(run_main, trace):
    varying = ("--noise", 0.1, "--drift", 2.0, "--move-cost", 300, "--movable")
    code, out, _ = run_main("simulate", trace, "--policies", "live,solo", "--max-jobs", 0, *varying, "--json")
    live, solo = json.loads(out)["policies"].values()
    assert code == 0 and solo["slo_attainment_real"] == 1.0 and live["slo_attainment_real"] >= 0.9
    assert live["lost_work_h"] >= live["moves_mean"] * 300 / 3600


def test_live_counts_on_what_jobs_say_and_the_others_do_not(run_main, trace):
    given = ("--policies", "live,ours", "--max-jobs", 0, "--move-cost", 300, "--movable", "--seeds", 2)
    truly, never = (
        json.loads(run_main("simulate", trace, *given, "--stop-early", share, "--json")[1])["policies"] for share in (0, 1)
    )
    assert truly["live"] != never["live"] and truly["ours"] == never["ours"]


def test_a_sweep_gives_for_each_value_what_a_run_of_its_own_would(run_main, trace):
    arguments = ("simulate", trace, "--policies", "solo,rollmux,ours", "--max-jobs", 0)
    for option, values in (("slo", ("1.1", "2")), ("cap", ("1", "3"))):
        code, out, _ = run_main(*arguments, "--sweep", f"{option}={','.join(values)}", "--json")
        report = json.loads(out)
        assert code == 0 and report["sweep"] == option and [run[option] for run in report["runs"]] == [float(v) for v in values]
        for value, run in zip(values, report["runs"], strict=True):
            assert {option: float(value), **json.loads(run_main(*arguments, f"--{option}", value, "--json")[1])} == run
        first, last = (run["policies"]["rollmux"]["usd_per_hour_mean"] for run in report["runs"])
        assert first > last  # more room to be slower, or more jobs in a group, and so fewer nodes


def test_a_sweep_as_a_table_has_a_line_for_each_value(run_main, trace):
    code, out, _ = run_main("simulate", trace, "--policies", "solo,gavel", "--max-jobs", 0, "--sweep", "cap=1, 5,5")
    head, *lines, foot = out.splitlines()
    assert code == 0 and head.split() == ["cap", "solo", "gavel"] and [line.split()[0] for line in lines] == ["1", "5"]
    assert all(line.split()[2] == "100.0%" for line in lines) and foot == "USD/h and SLO real; 12 jobs, 1 seeds"


def test_the_packaged_trace_has_300_jobs(run_main):
    code, out, _ = run_main("simulate", "--policies", "colocated", "--max-jobs", 0, "--json")
    assert code == 0 and json.loads(out)["jobs"] == 300


def test_in_a_finite_cluster_jobs_wait_and_all_finish(run_main, trace):
    sizes = ("--rollout-nodes", 4, "--train-nodes", 4)
    code, out, _ = run_main("simulate", trace, "--policies", "solo,ours", "--max-jobs", 0, *sizes, "--json")
    solo, ours = json.loads(out)["policies"].values()
    assert code == 0 and ours["wait_s_mean"] < solo["wait_s_mean"] and ours["slo_attainment"] == 1.0
    assert max(*ours["peak_gpus"].values()) <= 32


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("a,-1,1,8\n", "line 2: arrival_h is '-1'"),
        ("a,0,1,8\nb,1,-2,8\n", "line 3: duration_h is '-2'"),
        ("a,0,1,8\nb,zero,2,8\n", "line 3: arrival_h is 'zero'"),
        ("a,0\n", "line 2: expected 4 fields"),
        ("a,0,1,8,9\n", "line 2: expected 4 fields"),
        ("a,0,nan,8\n", "line 2: duration_h is 'nan'"),
        ("a,0,1,2.5\n", "line 2: gpus is '2.5'"),
        ("a,1e300,1,8\n", "arrival_h is '1e300'; a number of at least 0 and at most 100000"),
        ("a,0,1e300,8\n", "duration_h is '1e300'; a number above 0 and at most 100000"),
        ("a,0,1,\N{SUPERSCRIPT TWO}\n", "line 2: gpus is '\N{SUPERSCRIPT TWO}'; a whole number from 1"),
        ("a,0,1," + "9" * 6000, "a whole number from 1 to 8192 is needed"),
        ("a,0,1,100000\n", "line 2: gpus is '100000'; a whole number from 1 to 8192"),
        ("a,0,1,8\na,1,1,8\n", "line 3: job 'a' is there twice"),
        ("", "has no jobs"),
    ],
)
def test_a_bad_row_is_named_by_its_line(run_main, tmp_path, rows, words):
    path = tmp_path / "bad.csv"
    path.write_text(HEAD + rows)
    code, out, err = run_main("simulate", path)
    assert (code, out) == (2, "") and words in err and len(err.splitlines()) == 1


def test_a_missing_column_is_named(run_main, tmp_path):
    (tmp_path / "trace.csv").write_text("job,arrival_h\na,1\n")
    assert "column 'duration_h' is missing" in run_main("simulate", tmp_path / "trace.csv")[2]


def test_a_trace_as_spreadsheets_write_it_is_read(run_main, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xef\xbb\xbf" + (HEAD + "a,0,1,8\n").encode())
    assert run_main("simulate", path, "--policies", "solo")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--policies", "solo,best"),
            "policy 'best' is not known; allowed: solo, colocated, gavel, random, most-idle, rollmux, l",
        ),
        (("--policies", ","), "no policy given"),
        (("--shapes", "round"), "shapes 'round' are not known; allowed: balanced, rollout-heavy, train-heavy, mixed"),
        (("--slo", "0.9"), "SLO '0.9' is out of range"),
        (("--slo", "uniform:0.5,2"), "factor of at least 1"),
        (("--slo", "tight"), "SLO 'tight' is not understood"),
        (("--cap", "0"), "cap is 0"),
        (("--rule", "speed=on"), "rule 'speed=on' is not known"),
        (("--rule", "repack=no"), "give on or off"),
        (("--rule", "reach=x"), "whole number"),
        *(
            (("--estimates", spec), "allowed: exact, bound, mean")
            for spec in ("guess", "quantile", "quantile:1", "quantile:x", "bound:0.5")
        ),
        (("--policies", "optimum", "--max-jobs", "0"), "needs the optimum"),
        (("--sweep", "speed=1"), "--sweep is 'speed=1'; allowed: slo=NUMBER,NUMBER,... or cap=JOBS,JOBS,..."),
        (("--sweep", "slo"), "--sweep is 'slo'; allowed"),
        (("--sweep", "slo=1.5,0.9"), "SLO '0.9' is out of range"),
        (("--sweep", "cap=2,x"), "--sweep cap: 'x' is not a whole number of jobs"),
        (("--sweep", "cap=0"), "cap is 0"),
        (("--move-cost", "soon"), "--move-cost is 'soon'; seconds of at least 0 are needed, or the word measured"),
        (("--policies", "live", "--train-nodes", "9"), "policy 'live' does not queue"),
        (("--policies", "random", "--rollout-nodes", "9"), "policy 'random' does not queue"),
        (("--policies", "gavel", "--rollout-nodes", "9"), "policy 'gavel' does not queue"),
        (("--policies", "ours", "--train-nodes", "1"), "needs 2 train nodes; pool 'train' has 1"),
    ],
)
def test_a_bad_option_is_one_clear_line(run_main, trace, arguments, words):
    code, out, err = run_main("simulate", trace, *arguments)
    assert (code, out) == (2, "") and words in err and len(err.strip().splitlines()) == 1


def test_a_plan_says_where_at_what_price_and_why_not_elsewhere(run_main):
    code, out, _ = run_main("plan", "examples/placement/jobs.yaml", "--json")
    found = json.loads(out)
    assert code == 0 and [job["strategy"] for job in found["jobs"]] == [
        "isolated",
        "direct packing",
        "rollout scaling",
        "isolated",
    ]
    assert found["usd_per_hour"] == pytest.approx(sum(group["usd_per_hour"] for group in found["groups"]))
    assert found["usd_per_hour"] == pytest.approx(sum(job["usd_per_hour"] for job in found["jobs"]))
    assert found["usd_per_hour"] <= found["usd_per_hour_isolated"]
    assert all(other["why"] for job in found["jobs"] for other in job["alternatives"])
    code, out, _ = run_main("plan", "examples/placement/jobs.yaml")
    assert code == 0 and "not alone: costs 42.24 USD/h more" in out


def test_a_plan_for_a_job_that_can_be_colocated_says_why_it_is(run_main, tmp_path):
    path = tmp_path / "jobs.yaml"
    path.write_text(JOB.replace("train_s: 10", "train_s: 10, modes: [separate, colocated]"))
    out = run_main("plan", path)[1]
    assert "a: group g1; rollout on train-0; training on train-0" in out and "added 42.24 USD/h" in out
    assert "not alone: costs 14.80 USD/h more" in out and "every job alone 57.04" in out
    path.write_text(JOB.replace("train_s: 10", "train_s: 10, modes: [colocated]") + "rules: {colocate: false}\n")
    assert "every job alone 42.24" in run_main("plan", path)[1]


def test_a_plan_for_a_full_cluster_says_who_waits(run_main, tmp_path):
    path = tmp_path / "jobs.yaml"
    big = "  - {{name: {}, rollout_s: 100, train_s: 100, rollout_memory_gb: 900, train_memory_gb: 900}}\n"
    path.write_text("pools: {rollout: {nodes: 1, host_memory_gb: 1000}}\njobs:\n" + big.format("a") + big.format("b"))
    code, out, _ = run_main("plan", path)
    assert code == 0 and "b: waits, no room" in out and "free are 0 + inf" in out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("jobs: []", "jobs is empty"),
        ("jobs: [{name: a, rollout_s: 10}]", "job 'a': train_s is missing; give it, or what a step computes"),
        (JOB.replace("train_s: 10", "train_s: -10"), "job 'a': train_s is -10"),
        (JOB.replace("train_s: 10", "train_s: 10, slo: 0.5"), "slo is 0.5"),
        (JOB.replace("train_s: 10", "train_s: 10, gpu: 8"), "unknown field `gpu`"),
        (JOB + "pools: {rollout: {gpus_per_node: 0}}", "gpus is 0"),
        (JOB + "rules: {cap: 0}", "cap is 0"),
        (JOB + "rules: {repak: false}", "line 2: unknown field `repak`"),
        (JOB.replace("train_s", "trian_s"), "allowed: name, rollout_s, train_s"),
        (JOB.replace("name: a", "name: ''"), "a job has no name"),
        ("jobs: [", "is not YAML"),
    ],
)
def test_a_bad_jobs_file_is_one_clear_line(run_main, tmp_path, text, words):
    path = tmp_path / "jobs.yaml"
    path.write_text(text)
    code, out, err = run_main("plan", path)
    assert (code, out) == (2, "") and words in err and len(err.splitlines()) == 1
    assert run_main("plan", tmp_path / "none.yaml")[0] == 2


def test_a_cap_beyond_all_jobs_is_no_work(run_main, trace):
    one = run_main("simulate", trace, "--policies", "ours", "--max-jobs", 12, "--cap", 12, "--json")
    assert one[0] == 0 and run_main("simulate", trace, "--policies", "ours", "--max-jobs", 12, "--cap", 10**9, "--json") == one


@pytest.mark.parametrize(
    ("pools", "words"),
    [
        ("{rollout: {nodes: -3}}", "pools.rollout.nodes is -3; it must be from 1"),
        ("{train: {nodes: 1000000000}}", "from 1 to 100000"),
    ],
)
def test_a_pool_of_a_number_of_nodes_that_none_has_is_refused(run_main, tmp_path, pools, words):
    (tmp_path / "jobs.yaml").write_text(f"{JOB}pools: {pools}\n")
    code, _, err = run_main("plan", tmp_path / "jobs.yaml")
    assert code == 2 and words in err


ROWS = [TraceRow(f"job{i}", i * 0.7, 1.0 + 5 * i % 7) for i in range(7)]
SEEDS = 2


@pytest.mark.parametrize("shapes", ["balanced", "rollout-heavy", "train-heavy", "mixed"])
def test_no_policy_that_keeps_its_slos_costs_less_than_the_optimum_in_the_long_run(shapes):
    study = Study(
        rows=ROWS, shapes=find_shapes(shapes), slo=(1.0, 2.0), policies=("optimum", "live", "ours", "colocated", "solo"),
        cluster=TESTBED, rules=OURS, varying=Varying(0.1, 2.0), move_s=900.0, movable=True, seeds=SEEDS, max_optimum_jobs=1,
    )  # fmt: skip
    found = {name: each["usd_per_hour_mean"] for name, each in simulate(study)["policies"].items()}
    assert found["optimum"] <= 1e-6 + min(found.values()), found


def squared(task: int) -> int:
    return task * task


def refusing(refused: tuple[int, ...], task: int) -> int:
    if task in refused:
        raise UserError(f"task {task}")
    return task


def dying(task: int) -> int:
    os._exit(1)


@pytest.mark.parametrize("processes", [1, 2, 9])
def test_results_come_in_the_order_of_the_tasks_and_all_progress_is_told(processes):
    calls = []
    assert in_processes(squared, [3, 0, 2], lambda: calls.append(1), processes) == [9, 0, 4]
    assert len(calls) == 3


@pytest.mark.parametrize("processes", [1, 2])
def test_the_error_of_a_task_is_the_error_of_all(processes):
    with pytest.raises(UserError, match="^task 1$"):
        in_processes(functools.partial(refusing, (1,)), [0, 1, 2], int, processes)


def test_a_process_that_dies_is_one_clear_line():
    with pytest.raises(Failure, match="has died"):
        in_processes(dying, [0, 1], int, 2)
