"""`verl-mux plan` as a user meets it."""

import json
import socket
import sys
from pathlib import Path

import pytest
import yaml

from tests.memory.certificate.models import QWEN25_7B, verl
from verl_mux.errors import Failure
from verl_mux.launcher import plan_memory, run_processes
from verl_mux.launcher.plan_command import make_plan, plan_lines
from verl_mux.launcher.plan_jobs import read_jobs
from verl_mux.platform.host_memory import Room

EXAMPLE = Path(__file__).parents[2] / "examples" / "placement" / "jobs.yaml"

POOLS = """
pools:
  rollout: {kind: H20, nodes: [{name: r0, gpus: 8}]}
  train: {kind: H800, nodes: [{name: t0, gpus: 8, device_bytes: 480000000000}]}
"""
RUN = """
dir: {at}/run
coordinator: {{pools: {{rollout: {{nodes: [{{name: r0}}]}}, train: {{nodes: [{{name: t0}}]}}}}}}
overrides:
  - trainer.v1.trainer_mode=mux_separate
  - actor_rollout_ref.model.path={at}
  - actor_rollout_ref.rollout.name=sglang
  - actor_rollout_ref.rollout.nnodes=1
  - actor_rollout_ref.rollout.n_gpus_per_node=8
  - actor_rollout_ref.actor.strategy=fsdp2
jobs:
  math: {{nodes: {{rollout: [r0], train: [t0]}}, gpus: {{rollout: 1, train: 1}}}}
"""


@pytest.fixture
def composed(tmp_path):
    """A function that writes a composed config, with an interpolation in it, and gives its path."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN25_7B))

    def write(name, **rollout):
        config = verl(name, {"tensor_model_parallel_size": 2, **rollout}, model={"path": str(tmp_path)})
        config["data"]["max_prompt_length"] = "${data.max_response_length}"
        (tmp_path / f"{name}.yaml").write_text(yaml.dump(config))
        return tmp_path / f"{name}.yaml"

    return write


def test_gpus_that_no_lease_covers_are_named(composed, run_main):
    config = composed("math")
    with config.open("a") as file:
        file.write(yaml.dump({"distillation": {"enabled": True, "nnodes": 2, "n_gpus_per_node": 4}}))
    notes = json.loads(run_main("plan", "--memory", config, "--json")[1])["notes"]
    assert notes[0] == "math: 8 GPUs of its own for distillation, which no lease covers and no figure here counts"


def test_two_jobs_get_one_certificate(composed, run_main):
    code, out, _ = run_main("plan", "--memory", composed("math"), composed("code"), "--json")
    told = json.loads(out)
    assert code == 0 and told["fits"] is True
    assert set(told["parameters"]) == {"math", "code"} and told["per_token_kv_bytes"]["math"] == 57_344
    # Context, communicators, workspace, and the rollout worker's context; its graphs sleep.
    assert told["gpus"]["r0"]["phases"]["rollout"]["bytes"]["others"] == 1.6e9 + 1e9 + 0.54e9 + 0.5e9
    assert told["notes"] == [
        "r0: no --pools, so H20 is assumed, 102.6 GB a GPU",
        "t0: no --pools, so H800 is assumed, 85.5 GB a GPU",
    ]


def test_capacity_comes_from_the_coordinators_file(composed, run_main, tmp_path):
    (tmp_path / "pools.yaml").write_text(POOLS)
    planned = json.loads(run_main("plan", "--memory", composed("math"), "--pools", tmp_path / "pools.yaml", "--json")[1])
    assert (planned["gpus"]["r0"]["capacity"], planned["gpus"]["t0"]["capacity"]) == (102_600_000_000, 60 * 10**9)


def test_a_host_that_has_less_than_the_file_says_counts_by_what_it_has(composed, run_main, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_memory, "room", lambda: Room(64 * 10**9, 0, "/sys/fs/cgroup/pod"))
    here = f"host: {socket.gethostname()}, host_bytes: 1000000000000"
    (tmp_path / "pools.yaml").write_text(POOLS.replace("name: r0", f"name: r0, {here}"))
    told = json.loads(run_main("plan", "--memory", composed("math"), "--pools", tmp_path / "pools.yaml", "--json")[1])
    assert told["hosts"]["r0"]["capacity"] == 64 * 10**9
    assert "r0: 64 GB of host memory by /sys/fs/cgroup/pod here, less than its host_bytes" in told["notes"]


def test_what_does_not_fit_is_said_and_is_exit_code_1(composed, run_main):
    code, out, _ = run_main("plan", composed("math", gpu_memory_utilization=0.98), "--memory")
    assert code == 1 and "does not fit: r0: rollout of math needs" in out
    assert "largest gpu_memory_utilization that fits is 0.96" in out


def test_the_bytes_of_a_run_correct_it(composed, run_main, tmp_path):
    log = tmp_path / "run" / "math" / "events" / "server" / "step_1"
    log.mkdir(parents=True)
    line = {"timestamp": "2026-01-01T00:00:00+00:00", "event": "wake", "duration_sec": 0.1, "job": "math", "step": 1}
    extra = {"tag": "weights", "bytes": 16 * 10**9, "mapped": 16 * 10**9, "node": "r0", "side": "rollout"}
    (log / "worker_0.jsonl").write_text(json.dumps({**line, "extra": extra}) + "\n")
    told = json.loads(run_main("plan", "--memory", composed("math"), "--observed", tmp_path / "run", "--json")[1])
    assert told["gpus"]["r0"]["phases"]["rollout"]["bytes"]["weights"] == 8 * 10**9  # a replica of two GPUs


def test_a_run_files_jobs_are_composed_first(run_main, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN25_7B))
    (tmp_path / "run.yaml").write_text(RUN.format(at=tmp_path))
    code, out, err = run_main("plan", "--memory", tmp_path / "run.yaml", "--json")
    assert code == 0, err
    assert json.loads(out)["parameters"] == {"math": {"total": 7_615_616_512, "active": 7_615_616_512}}
    assert not (tmp_path / "run").exists()


@pytest.fixture
def refusal(run_main):
    """The one line that `plan --memory` of a file ends with."""

    def of(file):
        code, out, err = run_main("plan", "--memory", file)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        return err

    return of


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "is neither a composed verl config"),
        ("{actor_rollout_ref: {model: {path: /nowhere}, actor: {}}, data: '${no.such}'}", "no.such"),
    ],
)
def test_what_is_no_config_is_one_line(refusal, tmp_path, text, words):
    (tmp_path / "a.yaml").write_text(text)
    assert words in refusal(tmp_path / "a.yaml")


def test_options_of_the_certificate_need_it(run_main, tmp_path):
    assert "belong to --memory" in run_main("plan", "examples/placement/jobs.yaml", "--pools", tmp_path)[2]


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("actor_rollout_ref.rollout.engine_kwargs", {"sglang": [1]}, "engine_kwargs.sglang is [1]; keys are needed there"),
        (
            "actor_rollout_ref.rollout.engine_kwargs",
            {"sglang": {"max_total_tokens": "x"}},
            "max_total_tokens is 'x'; a number of 1",
        ),
        ("actor_rollout_ref.rollout.engine_kwargs", {"sglang": {"chunked_prefill_size": -2}}, "chunked_prefill_size is -2"),
        ("actor_rollout_ref.rollout.max_num_seqs", 10**30, "a number of 1 or more and at most 1000000000000 is needed"),
        ("actor_rollout_ref.actor.fsdp_config", {"fsdp_size": 0}, "fsdp_size is 0; a number of 1 or more"),
        ("actor_rollout_ref.model.lora_rank", "x", "lora_rank is 'x'; a number of 1 or more"),
        ("actor_rollout_ref.model.override_config", [1], "override_config is [1]; keys are needed there"),
        ("actor_rollout_ref.model.path", None, "model.path is None; a folder, or a name on a hub, is needed"),
        ("actor_rollout_ref", None, "model.path is None"),
        ("mux.nodes.train", 5, "mux.nodes.train is 5; a list of nodes is needed, or auto"),
        ("mux.device", {"budget": float("nan")}, "mux.device.budget is nan; GB of a GPU, above 0"),
        ("mux", 3, "mux is 3; keys are needed there"),
        ("data", "x", "data is 'x'; keys are needed there"),
    ],
)
def test_a_value_that_a_certificate_cannot_be_made_of_is_refused_by_name(composed, refusal, path, value, words):
    file = composed("math")
    config = yaml.safe_load(file.read_text())
    *above, key = path.split(".")
    place = config
    for name in above:
        place = place[name]
    place[key] = value
    file.write_text(yaml.dump(config))
    assert words in refusal(file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no model config to count parameters of"),
        ("[1]", "an object is expected, given is a list"),
        (json.dumps({**QWEN25_7B, "head_dim": "x"}), "head_dim is 'x'; a number of 1 or more is needed"),
        (json.dumps({**QWEN25_7B, "num_experts": -8}), "num_experts is -8"),
        (json.dumps({**QWEN25_7B, "num_experts": 8, "mlp_only_layers": 3}), "mlp_only_layers is 3; a list is needed"),
        (json.dumps({**QWEN25_7B, "num_hidden_layers": 10**12}), "at most 100000"),
        (json.dumps({**QWEN25_7B, "text_config": 3}), "text_config is 3; keys are needed there"),
    ],
)
def test_a_model_that_is_none_is_refused_by_name(composed, refusal, tmp_path, text, words):
    file = composed("math")
    (tmp_path / "config.json").write_text(text)
    assert words in refusal(file)


def test_whole_prompts_at_once_take_more_than_chunks(composed, run_main):
    def needs(size):
        told = run_main("plan", "--memory", composed("math", engine_kwargs={"sglang": {"chunked_prefill_size": size}}), "--json")
        return json.loads(told[1])["gpus"]["r0"]["phases"]["rollout"]["bytes"]["activations"]

    assert needs(-1) > needs(2048) > 0


def test_a_config_that_takes_too_long_is_said_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text(RUN.format(at=tmp_path))
    monkeypatch.setattr(plan_memory, "composition", lambda *_: [sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(run_processes, "_COMPOSED_S", 0.1)
    with pytest.raises(Failure, match="config of job 'math' was not composed within 0.1 s"):
        plan_memory.certificate_of([tmp_path / "run.yaml"], None, None)


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
    assert all(f"    {sentence}" in plan_lines(found) for sentence in said.values())


def test_a_job_that_came_first_and_is_shared_with_now_is_not_called_isolated():
    lines = plan_lines(make_plan(read_jobs(EXAMPLE)))
    heads = [line for line in lines if line.startswith("code-7b: ")]
    assert heads == ["code-7b: group g1; rollout on rollout-0; training on train-0"]
    assert not any("isolated" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("jobs: [{name: a}]", "is a file of jobs to place; --memory wants composed verl configs or a run file"),
        ("defaults: [ppo_trainer]\nactor_rollout_ref: {}", "is a config of Hydra's that is not composed yet: `--cfg job > FILE`"),
    ],
)
def test_another_kind_of_file_is_called_by_its_name(tmp_path, refusal, text, words):
    (tmp_path / "other.yaml").write_text(text)
    assert words in refusal(tmp_path / "other.yaml")


def test_a_hub_that_does_not_answer_is_asked_once(composed, refusal, monkeypatch):
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, local_files_only=False: _not_here(local_files_only))
    monkeypatch.setattr("huggingface_hub.HfApi.file_exists", lambda *_: False)
    file = composed("math")
    file.write_text(file.read_text().replace(f"path: {file.parent}", "path: maker/model"))
    assert "path=maker/model: no model config to count parameters of: no hub here has it; a folder with" in refusal(file)


def _not_here(local_files_only):
    assert local_files_only  # else it would be asked for, again and again
    raise FileNotFoundError


def test_who_waits_is_told_why(tmp_path):
    file = tmp_path / "jobs.yaml"
    file.write_text(
        "pools: {rollout: {nodes: 1}, train: {nodes: 1}}\n"
        "jobs: [{name: a, rollout_s: 100, train_s: 100, slo: 1}, {name: b, rollout_s: 300, train_s: 30, slo: 1}]\n"
    )
    assert make_plan(read_jobs(file))["jobs"][1]["why"] == "b waits: no room within everybody's SLO"
