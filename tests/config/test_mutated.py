"""Configs that were mutated at random: taken, or refused in one line; never a traceback."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path

import pytest
import verl
from hydra import compose, initialize_config_dir
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.exploring import examples
from tests.memory.certificate.models import QWEN25_7B
from verl_mux.coordinator.config import read_config
from verl_mux.errors import Failure, UserError
from verl_mux.launcher import doctor, run_file

ROOT = Path(__file__).parents[2]
KEYS = [
    "actor_rollout_ref.rollout.name=sglang", "trainer.v1.trainer_mode=mux_separate", "trainer.experiment_name=exp",
    "actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=8",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
]  # fmt: skip
# Where a value of the job is read; elsewhere verl alone reads it.
SECTIONS = ("mux", "trainer", "data", "algorithm", "critic", "actor_rollout_ref", "reward_model", "transfer_queue")
JUNK = [
    None, "", " ", "8", "8.0", "eight", -1, 0, 1, 1.5, 2**70, float("nan"), float("inf"), True, [], {}, [None], {"a": {}}, "???",
    "${missing}", "${", "${oc.env:NONE}", "\x1b[2J", "\ud800", "x" * 5000, "auto", [["r0"]], {"r0": 1}, "/nowhere", "2024-01-01",
]  # fmt: skip
quietly = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=examples(15),
)  # fmt: skip


@functools.cache
def whole(model):
    """verl's config of a job of ours, as `--cfg job` prints it, and the path of every key in it."""
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", [*KEYS, f"actor_rollout_ref.model.path={model}"])
    plain = OmegaConf.to_container(config, resolve=False)
    plain["mux"] = OmegaConf.to_container(OmegaConf.load(ROOT / "verl_mux" / "config" / "mux" / "default.yaml"))
    return plain, [path for path in paths(plain) if path[0] in SECTIONS]


def paths(tree, above=()):
    for key, value in tree.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from paths(value, (*above, key))


def put(tree, path, value):
    for key in path[:-1]:
        tree = tree.get(key) if isinstance(tree, dict) else None
    if isinstance(tree, dict):
        tree.pop(path[-1], None) if value == "gone" else tree.update({path[-1]: copy.deepcopy(value)})


def held(function, *given):
    """It may refuse, in one line."""
    refused = ""
    try:
        function(*given)
    except (UserError, Failure) as error:
        refused = str(error)
    assert "\n" not in refused


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(QWEN25_7B))
    return folder


@quietly
@given(data=st.data())
def test_a_jobs_config(model, monkeypatch, capsys, data):
    config, keys = copy.deepcopy(whole(model)[0]), whole(model)[1]
    for _ in range(data.draw(st.integers(1, 3))):
        put(config, data.draw(st.sampled_from(keys)), data.draw(st.sampled_from(["gone", *JUNK])))
    monkeypatch.setattr(doctor, "read_yaml", lambda file: config)
    held(doctor.judge_job, None, Path("job.yaml"), True)


TEXTS = [ROOT / "examples" / "demo.yaml", ROOT / "examples" / "placement" / "jobs.yaml"]
COORDINATOR = """
pools:
  rollout: {kind: H20, nodes: [{name: r0, gpus: 8, usd_per_hour: 14.8, host_bytes: 1000000000000, host: gpu-01, gpu_ids: null}]}
  train:
    kind: H800
    nodes:
      - {name: t0, gpus: 8, usd_per_hour: 42.24}
schedule: [{mode: sequential, steps: 3}, {mode: interleaved}]
expect_jobs: 2
remote_grace: 120
metrics_port: 9464
placement: {rollout: rollout, train: [train], slo: 1.5}
"""
WORDS = st.sampled_from([
    "", "null", "~", "-1", "0", "1e999", ".nan", "true", "[]", "{}", "- ", ": ", "&a ", "*a", "!!python/object:os.system ", "'",
    '"', "#", "\t", "\n", "  ", "{", "[", "<<: *a", "2024-01-01", "0x10", "\0", "\x9b", "e" * 300,
])  # fmt: skip


@st.composite
def mutated(draw, text):
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        text = text[:start] + draw(WORDS) + text[start + draw(st.integers(0, 12)) :]
    return text


@quietly
@given(data=st.data())
def test_a_coordinators_file(tmp_path, data):
    (tmp_path / "pools.yaml").write_text(data.draw(mutated(COORDINATOR)))
    held(read_config, tmp_path / "pools.yaml")


@pytest.mark.parametrize("example", TEXTS, ids=lambda path: path.parent.name)
@quietly
@given(data=st.data())
def test_a_run_file(tmp_path, example, data):
    (tmp_path / "run.yaml").write_text(data.draw(mutated(example.read_text())))
    held(run_file.read, tmp_path / "run.yaml")
