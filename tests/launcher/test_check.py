"""`verl-mux run --check`: all that is wrong is said before anything starts."""

import importlib.util
import json
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from tests.memory.certificate.models import QWEN25_7B
from verl_mux.errors import UserError
from verl_mux.launcher import check, run_file

NODES = {"rollout": ["r0"], "train": ["t0"]}
POOLS = {
    "rollout": {"kind": "H20", "nodes": [{"name": "r0", "gpus": 8}]},
    "train": {"kind": "H800", "nodes": [{"name": "t0", "gpus": 8}]},
}
GOOD = {
    "trainer": {"nnodes": 1, "n_gpus_per_node": 8, "v1": {"trainer_mode": "mux_separate"}},
    "actor_rollout_ref": {
        "rollout": {"name": "sglang", "nnodes": 1, "n_gpus_per_node": 8, "tensor_model_parallel_size": 2},
        "actor": {"ppo_micro_batch_size_per_gpu": 1},
    },
    "data": {"train_batch_size": 128},
    "algorithm": {"adv_estimator": "grpo"},
    "mux": {"job": "math", "nodes": NODES},
}


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """check(changes of one job's composed config, **keys of the run file) -> (what is wrong, what else is said)."""
    spec = importlib.util.find_spec("verl") or pytest.skip("needs verl")
    whole = Path(spec.submodule_search_locations[0], "trainer", "config", "_generated_ppo_trainer.yaml")
    for name in ("train.parquet", "val.parquet"):
        (tmp_path / name).touch()
    (tmp_path / "config.json").write_text(json.dumps(QWEN25_7B))
    files = {"train_files": str(tmp_path / "train.parquet"), "val_files": [str(tmp_path / "val.parquet")]}
    here = {"data": files, "actor_rollout_ref": {"model": {"path": str(tmp_path)}}}

    def run(changes=None, **keys):
        config = OmegaConf.merge(OmegaConf.load(whole), GOOD, here, changes or {})
        monkeypatch.setattr(check, "composed", lambda *_: OmegaConf.to_container(config))
        monkeypatch.setattr(check, "require_verl", lambda run: None)
        monkeypatch.delenv("VERL_PLATFORM", raising=False)
        given = {"dir": str(tmp_path / "run"), "coordinator": {"pools": POOLS}, "jobs": {"math": {"nodes": NODES}}, **keys}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(given))
        return check.check(run_file.read(tmp_path / "run.yaml"))

    return run


def test_a_run_that_would_start(checked, monkeypatch):
    monkeypatch.setattr(check, "cpu_platform_wanted", lambda *_: False)
    wrong, notes = checked()
    assert wrong == [] and "memory: r0: H20, 103 GB a GPU" in notes


def test_all_that_is_wrong_is_said_at_once(checked, tmp_path):
    wrong, notes = checked({
        "trainer": {"nnodes": 2, "use_v1": False},
        "actor_rollout_ref": {"rollout": {"n_gpus_per_node": 16}, "model": {"path": "/nowhere/model"}},
        "data": {"train_files": "~/no/train.parquet", "val_files": ["hdfs://there/val.parquet", "val.parquet"]},
    })  # fmt: skip
    text = "\n".join(wrong)
    for words in (
        "job 'math': trainer.use_v1=False starts verl's legacy trainer",
        "job 'math': actor_rollout_ref.model.path=/nowhere/model: there is no such file or folder on this machine",
        "job 'math': data.train_files=~/no/train.parquet: there is no such file",
        "job 'math': data.val_files=val.parquet: there is no such file",  # of the job's folder
        "job 'math': trainer.nnodes is 2, and nodes.train names 1 (t0); they must be equal",
        "actor_rollout_ref.rollout.n_gpus_per_node is 16, and node 'r0' has 8",
    ):
        assert words in text
    assert "hdfs" not in text and notes == []


def test_what_prepare_will_make_is_not_missing(checked, tmp_path):
    made = {"actor_rollout_ref": {"model": {"path": f"{tmp_path}/run/assets/model"}}}
    assert "is no such file" in checked(made)[0][0]
    wrong, notes = checked(made, prepare=[["python", "make.py"]])
    assert wrong == [] and notes[0].startswith("memory: not judged, job 'math': ")


def test_jobs_that_do_not_fit_are_refused_with_the_reason(checked, monkeypatch):
    monkeypatch.setattr(check, "cpu_platform_wanted", lambda *_: False)
    pools = {
        side: {**pool, "nodes": [{**node, "device_bytes": 8 * 10**9} for node in pool["nodes"]]} for side, pool in POOLS.items()
    }
    wrong, _ = checked(coordinator={"pools": pools})
    assert wrong and all(text.startswith("memory: ") for text in wrong)


def test_a_config_that_cannot_be_composed_is_one_of_the_mistakes(checked, monkeypatch, tmp_path):
    checked()

    def refuses(command, whose, environment):
        raise UserError(f"{whose} cannot be composed: Could not override 'trainer.nodes'.")

    monkeypatch.setattr(check, "composed", refuses)
    wrong, notes = check.check(run_file.read(tmp_path / "run.yaml"))
    assert (wrong, notes) == (["the config of job 'math' cannot be composed: Could not override 'trainer.nodes'."], [])


def test_the_command_says_all_and_ends_with_code_2(monkeypatch, run_main, tmp_path):
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump({"dir": "run", "coordinator": {"pools": POOLS}, "jobs": {"math": {"nodes": NODES}}})
    )
    for found, code in (((["one", "two"], []), 2), (([], ["memory: fits"]), 0)):
        monkeypatch.setattr(check, "check", lambda run, found=found: found)
        ended, out, err = run_main("run", "--check", tmp_path / "run.yaml")
        assert (
            ended == code and ("refused  one\nrefused  two" in out) is bool(code) and ("nothing would run" in err) is bool(code)
        )
    assert "memory: fits\n" in out and "1 jobs would start" in out and not (tmp_path / "run").exists()
