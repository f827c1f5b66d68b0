"""The keys under `mux`: what is allowed passes, everything else is refused by name, value and what is allowed."""

from pathlib import Path

import msgspec
import pytest
from omegaconf import OmegaConf

from verl_mux.config import schema
from verl_mux.config.job_checks import load
from verl_mux.config.schema import MuxConfig, RolloutConfig, SyncConfig, default_yaml, leaves
from verl_mux.errors import UserError
from verl_mux.platform.charges import DeviceSettings

DEFAULTS = Path(schema.__file__).parent / "mux" / "default.yaml"


def verl_config(mux: dict | None = None, **changes):
    """The part of a verl config that is looked at, for a job that is allowed; `changes` by dotted key with __ for the dot."""
    rollout = {
        "name": "sglang", "nnodes": 1, "n_gpus_per_node": 8, "tensor_model_parallel_size": 2, "data_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }  # fmt: skip
    config = OmegaConf.create(
        {
            "trainer": {"v1": {"trainer_mode": "mux_separate"}, "experiment_name": "exp", "nnodes": 1, "n_gpus_per_node": 8},
            "actor_rollout_ref": {"rollout": rollout},
            "algorithm": {},
        }
    )
    if mux is not None:
        config.mux = mux
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value)
    return config


def refusal(config, function=load) -> str:
    with pytest.raises(UserError) as error:
        function(config)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_yaml_is_written_from_the_schema():
    assert DEFAULTS.read_text() == default_yaml()
    assert len(leaves(MuxConfig, "mux")) <= 41
    assert OmegaConf.to_container(OmegaConf.load(DEFAULTS)) == msgspec.json.decode(msgspec.json.encode(MuxConfig()))


@pytest.mark.parametrize("mux", [None, {}, {"nodes": {}, "sync": {}}])
def test_what_is_left_out_has_its_default(mux):
    assert load(verl_config(mux)) == MuxConfig(job="exp")


def test_what_is_given_is_kept():
    given = {
        "job": "math", "coordinator": "tcp://10.0.0.1:5570", "keys": "/keys", "seed": 3, "seeded_sampling": True, "slo": 1.5,
        "nodes": {"rollout": ["r0", "r1"], "train": ["t0"]}, "move_note": "/runs/left_to_move",
        "sync": {**msgspec.to_builtins(SyncConfig()), "verify": False, "timeout_s": 9.5},
        "profile": {"enable": False, "dir": "/logs", "every": 2, "texts": 0.1, "stalls": "trace"},
        "profiled": {"rollout": [9.0, 9.5, 9.0], "train": [5.0, 5.0, 5.5]}, "launch": {"warm": True},
    }  # fmt: skip
    whole = {**given, "rollout": msgspec.to_builtins(RolloutConfig()), "device": msgspec.to_builtins(DeviceSettings())}
    assert msgspec.to_builtins(load(verl_config(given))) == whole


def test_a_value_may_point_anywhere_in_the_config():
    mux = load(verl_config({"job": "${trainer.experiment_name}-2", "profile": {"dir": "runs/${mux.seed}"}, "seed": 4}))
    assert (mux.job, mux.profile.dir) == ("exp-2", "runs/4")


def test_without_any_name_the_job_is_called_job():
    assert load(OmegaConf.create({})).job == "job"


KEYS = "it holds the keys job, coordinator"


@pytest.mark.parametrize(
    ("mux", "words"),
    [
        # unknown keys
        ({"nodez": 1}, ["unknown key mux.nodez", "job, coordinator,", "nodes"]),
        ({"nodes": {"rolout": ["a"]}}, ["unknown key mux.nodes.rolout", "allowed here: rollout, train"]),
        ({"sync": {"verifi": True}}, ["unknown key mux.sync.verifi", "allowed here: verify, timeout_s"]),
        ({"nodes": {"a": {"b": 1}}}, ["unknown key mux.nodes.a"]),
        # values of the wrong kind
        ({"seed": "abc"}, ["mux.seed", "'abc'", "int"]),
        ({"seed": 1.5}, ["mux.seed", "1.5", "int"]),
        ({"seed": None}, ["mux.seed", "None", "int"]),
        ({"seeded_sampling": "perhaps"}, ["mux.seeded_sampling", "'perhaps'", "bool"]),
        ({"slo": "soon"}, ["mux.slo", "'soon'", "float"]),
        ({"coordinator": ["tcp://a"]}, ["mux.coordinator", "tcp://a", "str | None"]),
        ({"nodes": {"rollout": "r0"}}, ["mux.nodes.rollout", "'r0'", "list[str]"]),
        ({"nodes": {"train": [None]}}, ["mux.nodes.train", "None", "list[str]"]),
        ({"sync": {"timeout_s": []}}, ["mux.sync.timeout_s", "[]", "float"]),
        ({"nodes": 3}, ["mux.nodes is 3", "rollout, train"]),
        ({"nodes": None}, ["mux.nodes is None", "rollout, train"]),
        ({"profile": True}, ["mux.profile is True", "enable, dir"]),
        ({"sync": ["a"]}, ["mux.sync is ['a']", "verify, timeout_s"]),
        # something else than keys
        *[(mux, [f"mux is {mux!r}; {KEYS}"]) for mux in (5, "on", ["job"])],
        # values that make no sense
        ({"sync": {"timeout_s": float("nan")}}, ["mux.sync.timeout_s=nan is not possible; allowed: float"]),
        ({"sync": {"timeout_s": -3}}, ["mux.sync.timeout_s=-3 ", "above 0 seconds"]),
        ({"device": {"budget": 0}}, ["mux.device.budget=0 is not possible", "above 0"]),
        ({"device": {"wake_wait_s": -1}}, ["mux.device.wake_wait_s=-1 ", "0 seconds or more"]),
        ({"device": {"sleep_level": 3}}, ["mux.device.sleep_level='3' is not possible; allowed: auto, 1, 2"]),
        ({"sync": {"transport": "nixl", "verify": False}}, ["mux.sync.transport=nixl", "must be True"]),
        ({"profile": {"texts": 1.5}}, ["mux.profile.texts=1.5", "0 to 1"]),
        ({"profile": {"every": 0}}, ["mux.profile.every=0", "1 or more"]),
        ({"profile": {"stalls": "yes"}}, ["mux.profile.stalls", "'yes'", "stacks", "trace"]),
        ({"nodes": {"rollout": []}}, ["mux.nodes.rollout is empty"]),
        ({"job": "${no.such.key}"}, ["mux: ", "no.such.key"]),
        # what the coordinator chooses, and what it is given to choose by
        ({"nodes": "auto"}, ["mux.coordinator is not set"]),
        (
            {"nodes": {"rollout": ["auto"], "train": ["t0"]}, "coordinator": "tcp://h:1"},
            ["chooses both (mux.nodes=auto)"],
        ),
        (
            {"nodes": "auto", "coordinator": "tcp://h:1", "slo": 0.5},
            ["slo=0.5 is not possible; allowed: float | None, 1 or"],
        ),
        ({"nodes": "any"}, ["mux.nodes is 'any'"]),
        ({"profiled": {"rollout": [1.0], "train": [1.0]}}, ["mux.profiled has 1 rollouts and 1 training phases"]),
        ({"profiled": {"rollout": [1.0, 1.0, 1.0], "train": []}}, ["mux.profiled has 3 rollouts and 0 training phases"]),
    ],
)
def test_what_is_not_allowed_is_refused_by_name_value_and_what_is(mux, words):
    config = verl_config()
    config.mux = mux
    text = refusal(config)
    assert all(word in text for word in words), text


def test_a_transport_whose_package_is_not_here_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = refusal(verl_config({"sync": {"transport": "nixl"}}))
    assert "mux.sync.transport=nixl: the package nixl is not installed here" in text
