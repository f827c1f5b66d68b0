"""What the jobs of a file would cost on GPUs of other kinds."""

import json
from pathlib import Path

import pytest

from verl_mux.errors import UserError
from verl_mux.launcher.plan.jobs_file import read_jobs
from verl_mux.launcher.plan.other_kinds import lines, other_kinds

EXAMPLE = Path(__file__).parents[3] / "examples" / "placement" / "kinds.yaml"
QWEN_7B = {
    **{"hidden_size": 3584, "num_hidden_layers": 28, "intermediate_size": 18944, "vocab_size": 152064},
    **{"num_attention_heads": 28, "num_key_value_heads": 4},
}
STEP = {"model": QWEN_7B, "responses": 256, "prompt_tokens": 1024, "response_tokens": 8192}
# Nothing but what scales with the GPU: twice as fast in all at twice the price is as dear.
SLOW = {"tflops": 500, "tb_per_s": 2, "memory_gb": 10000, "fixed_s": 0, "usd_per_gpu_hour": 2}
FAST = {**SLOW, "tflops": 1000, "tb_per_s": 4, "usd_per_gpu_hour": 4}
CHEAP = {**SLOW, "usd_per_gpu_hour": 1}


@pytest.fixture
def asked(tmp_path):
    def ask(jobs, kinds=None, rollout="H20", train="H800", **more):
        file = tmp_path / "jobs.yaml"
        pools = {"rollout": {"kind": rollout}, "train": {"kind": train}}
        file.write_text(json.dumps({"jobs": jobs, "kinds": kinds or {}, "pools": pools, **more}))
        return other_kinds(read_jobs(file))

    return ask


def job(name="a", **more):
    return {"name": name, "computes": STEP, "sync_s": 0, **more}


def choice(found, rollout, train, colocated=False):
    named = {"rollout": rollout, "train": train, "colocated": colocated}
    return next(it for it in found["choices"] if named.items() <= it.items())


def place(found, name, rollout, train, colocated=False):
    named = {"rollout": rollout, "train": train, "colocated": colocated}
    (job,) = [job for job in found["jobs"] if job["job"] == name]
    return next(it for it in job["places"] if named.items() <= it.items())


def test_what_is_twice_as_fast_for_twice_the_money_costs_as_much(asked):
    found = asked([job()], {"slow": SLOW, "fast": FAST}, "slow", "slow")
    both, own = place(found, "a", "fast", "fast"), place(found, "a", "slow", "slow")
    assert both["step_s"] == pytest.approx(own["step_s"] / 2) and both["usd_per_hour"] == 2 * own["usd_per_hour"] == 64
    assert both["usd_per_step"] == pytest.approx(own["usd_per_step"])
    assert choice(found, "fast", "fast")["work_usd_per_hour"] == pytest.approx(found["file"]["work_usd_per_hour"]) == 32
    assert choice(found, "fast", "fast")["usd_per_hour"] == 64


def test_the_cheapest_two_kinds_are_named(asked):
    found = asked([job()], {"slow": SLOW, "cheap": CHEAP}, "slow", "slow")
    assert found["cheapest"] == "choices" and (found["choices"][0]["rollout"], found["choices"][0]["train"]) == ("cheap", "cheap")
    assert found["choices"][0]["work_usd_per_hour"] == pytest.approx(16)
    assert "    cheapest: cheap for rollout, cheap for training, 50% less than as in the file" in lines(found)


def test_measured_seconds_are_scaled_as_the_bounds_differ(asked):
    found = asked([job(rollout_s=100, train_s=60, slo=9)], {"H100": {"usd_per_gpu_hour": 3}})
    # By hand: 8192 tokens, each a read of 2 * 7.62e9 bytes and of 32 requests' keys and values at half their length, at 0.3 of
    # the bandwidth; 1024 tokens of 32 prompts at 0.3 of the peak; two seconds for whatever a phase does.
    params = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944) + 2 * 152064 * 3584
    read = 2 * params + 32 * 2 * 2 * 28 * 512 * (1024 + 4096)
    prefill = 32 * (2 * params * 1024 + 2 * 28 * 3584 * 1024**2)
    h20, h100 = (2 + 8192 * read / (tb * 3e11) + prefill / (peak * 3e11) for tb, peak in ((4.0, 148.0), (3.35, 989.4)))
    assert place(found, "a", "H100", "H800")["step_s"] == pytest.approx(60 + 100 * h100 / h20, rel=1e-3)


def test_seconds_alone_are_of_one_kind(asked):
    found = asked([{"name": "a", "rollout_s": 10, "train_s": 10}])
    assert found["choices"] == [] and found["cheapest"] == "file" and found["jobs"] == [{"job": "a", "places": []}]
    assert lines(found) == [
        "other kinds of GPUs: not compared, as no job says what a step computes (`computes`); seconds are of H20 and H800"
    ]


def test_who_cannot_be_elsewhere_stays_and_is_in_the_sum(asked):
    plain = {"name": "b", "rollout_s": 100, "train_s": 100, "slo": 1}
    found = asked([job(slo=1), plain], {"slow": SLOW, "cheap": CHEAP}, "slow", "slow")
    cheap = choice(found, "cheap", "cheap")
    assert list(cheap["stay"]) == ["b"] and "seconds alone, which are of slow and slow" in cheap["stay"]["b"]
    assert cheap["usd_per_hour"] == pytest.approx(16 + 32)
    assert any(line.startswith("    b: its phases are given in seconds alone") for line in lines(found))


def test_an_slo_stays_what_it_is_in_seconds(asked):
    found = asked([job(slo=1.5)], {"slow": SLOW, "fast": FAST}, "fast", "fast")
    assert "its SLO allows" in place(found, "a", "slow", "slow")["why"]
    assert not any(it["rollout"] == it["train"] == "slow" for it in found["choices"])


def test_a_model_that_does_not_fit_on_a_gpu_is_not_put_there(asked):
    found = asked([job()], {"slow": SLOW, "small": {**CHEAP, "memory_gb": 16}}, "slow", "slow")
    assert place(found, "a", "small", "slow")["why"] == "its model leaves no room for one request on 1 small"
    assert place(found, "a", "slow", "small")["why"] == ""


def test_both_phases_on_one_kind_are_a_choice_for_jobs_that_can(asked):
    found = asked([job(modes=["separate", "colocated"]), job("b")], {"slow": SLOW, "fast": FAST}, "slow", "slow")
    assert choice(found, "fast", "fast", True)["stay"] == {"b": "it cannot run colocated"}
    one, two = place(found, "a", "fast", "fast", True), place(found, "a", "fast", "fast")
    assert one["step_s"] == two["step_s"] and one["usd_per_hour"] == two["usd_per_hour"] / 2
    alone = asked([job(modes=["colocated"])], {"slow": SLOW, "fast": FAST}, "slow", "slow")
    assert place(alone, "a", "fast", "fast")["why"] == "it runs colocated alone"
    assert place(alone, "a", "fast", "fast", True)["step_s"] == pytest.approx(one["step_s"])


def test_each_job_may_be_on_kinds_of_its_own(asked):
    # One reads much and trains little, so that a dear training node would mostly be idle; the other one trains most of the time.
    kinds = {"reads": {**SLOW, "tb_per_s": 8}, "computes": {**SLOW, "tflops": 4000, "usd_per_gpu_hour": 6}, "slow": SLOW}
    talks = job("talks", computes={**STEP, "response_tokens": 60000, "responses": 8})
    learns = job("learns", computes={**STEP, "response_tokens": 100, "responses": 4096, "updates": 4})
    found = asked([talks, learns], kinds, "slow", "slow", rules={"cap": 1})
    where = found["each"]["jobs"]
    assert found["cheapest"] == "each" and where["talks"]["rollout"] == "reads" and where["learns"]["train"] == "computes"
    assert where["talks"] != where["learns"]
    assert found["each"]["work_usd_per_hour"] < found["choices"][0]["work_usd_per_hour"]
    assert any("cheapest: each where it adds the least" in line for line in lines(found))


def test_a_pool_of_a_known_kind_has_its_price_and_the_files_price_holds_on_both_sides(asked):
    found = asked([job()], {"H100": {"usd_per_gpu_hour": 3}}, "H800", "H100")
    assert found["prices"] == {"H20": 1.85, "H800": 5.28, "H100": 3.0, "H200": None}
    assert found["file"]["usd_per_hour"] == pytest.approx(8 * (5.28 + 3))
    assert "give `kinds: {NAME: {usd_per_gpu_hour: ...}}`" in lines(found)[-1] and "H200" in lines(found)[-1]


def test_jobs_that_share_nodes_which_cost_nothing_are_cheapest_there(tmp_path):
    file = tmp_path / "jobs.yaml"
    own = {"kind": "H20", "usd_per_gpu_hour": 0}
    jobs = [job(name, rollout_s=rollout, train_s=train, slo=2) for name, rollout, train in (("a", 100, 60), ("b", 60, 100))]
    file.write_text(json.dumps({"jobs": jobs, "pools": {"rollout": own, "train": own}}))
    found = other_kinds(read_jobs(file))
    assert (found["file"]["work_usd_per_hour"], found["cheapest"]) == (0.0, "file")
    assert any("cheapest: as in the file" in line for line in lines(found))


def test_nodes_are_rented_whatever_the_pools_have(tmp_path):
    file = tmp_path / "jobs.yaml"
    pools = {"rollout": {"usd_per_gpu_hour": 2.0, "nodes": 1}, "train": {"nodes": 1}}
    file.write_text(json.dumps({"jobs": [job("a", slo=1), job("b", slo=1)], "pools": pools}))
    found = other_kinds(read_jobs(file))
    # They can take turns at rollouts, but not at trainings, of which each takes most of its step.
    assert found["file"]["usd_per_hour"] == pytest.approx(8 * (2 + 2 * 5.28)) and found["prices"]["H20"] == 2.0


def test_a_model_may_be_a_folder(tmp_path):
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "config.json").write_text(json.dumps(QWEN_7B))
    file = tmp_path / "jobs.yaml"
    file.write_text(json.dumps({"jobs": [job(computes={**STEP, "model": "qwen"})]}))
    by_folder = read_jobs(file).jobs
    file.write_text(json.dumps({"jobs": [job()]}))
    assert by_folder == read_jobs(file).jobs and by_folder[0].rollout.source == "bound"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kinds": {"L4": {"tb_per_s": 0.3}}}, "kinds.L4: Object missing required field `tflops`; allowed: tflops"),
        ({"kinds": {"H100": {"price": 3}}}, "kinds.H100: Object contains unknown field `price`; allowed: tflops"),
        ({"kinds": {"H100": {"tflops": -1}}}, "kinds.H100: GPU kind: tflops is -1"),
        ({"pools": {"rollout": {"kind": "H100"}}}, "pools.rollout has no price: of kind 'H100' none is known"),
        ({"pools": {"train": {"kind": "mine", "usd_per_gpu_hour": 1}}}, "GPU kind 'mine' is not known"),
        ({"jobs": [job(computes={**STEP, "model": "/nowhere"})]}, "job 'a': computes: model is '/nowhere'; a folder"),
        ({"jobs": [job(computes={**STEP, "model": {}})]}, "job 'a': computes: model config: hidden_size is None"),
        ({"jobs": [job(computes={**STEP, "responses": 0})]}, "job 'a': computes: Expected `int` >= 1 - at `$.responses`"),
        ({"jobs": [job(computes={**STEP, "tokens": 1})]}, "unknown field `tokens` - at `$.jobs[0].computes`; allowed: model"),
    ],
)
def test_what_cannot_be_compared_is_one_clear_line(tmp_path, changed, words):
    file = tmp_path / "jobs.yaml"
    file.write_text(json.dumps({"jobs": [job()], **changed}))
    with pytest.raises(UserError) as raised:
        read_jobs(file)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_the_example_names_what_is_cheapest(run_main):
    code, out, _ = run_main("plan", EXAMPLE, "--json")
    kinds = json.loads(out)["kinds"]
    assert code == 0 and kinds["cheapest"] == "each" and kinds["prices"]["L40S"] == 1.1
    assert kinds["each"]["jobs"]["tools-8b"] == {"rollout": "H20", "train": "H800", "colocated": False}
    out = run_main("plan", EXAMPLE)[1]
    assert "cheapest: each where it adds the least" in out and "that cost more (--json has all)" in out
    assert "tools-8b: its phases are given in seconds alone, which are of H20 and H800" in out
