"""The event log of verl's own modes; how many prompt groups the training trigger's buffer returns."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")

from tests.config.test_schema import verl_config
from tests.profiling.made_engines import make
from tests.trainer.fencing import made_buffer
from verl_mux.config.preflight import complete_stock_mode
from verl_mux.config.schema import MuxConfig, RolloutConfig, TriggerConfig
from verl_mux.errors import UserError
from verl_mux.rollout.control.trigger import TrainingTrigger
from verl_mux.trainer import stock_modes as module
from verl_mux.trainer.replay_buffer import MuxReplayBuffer
from verl_mux.trainer.stock_modes import TriggeredReplayBuffer, attach_trigger, instrument
from verl_mux.worker_settings import WorkerSettings


@pytest.fixture
def trainer(tmp_path):
    """At step 2 of a job whose requests are logged."""
    make(tmp_path, seed=1, steps=2, requests=30, replicas=2)
    settings = WorkerSettings(job="a", uid="0a1b2c3d", events_dir=str(tmp_path / "a" / "events"))
    rollout = {"custom": {"verl_mux": settings.to_dict()}}
    mux = {"profile": {"enable": True}}
    config = {"trainer": {"v1": {"trainer_mode": "sync"}}, "actor_rollout_ref": {"rollout": rollout}, "mux": mux}
    made = SimpleNamespace(config=OmegaConf.create(config), global_steps=2)
    made.replay_buffer = SimpleNamespace(sample=lambda *given: None)
    for name in module._PARTS:
        setattr(made, name, lambda *given: None)
    made._compute_metrics = lambda batch, metrics, *more: metrics.update(theirs=1.0)
    return made


def test_a_steps_metrics_get_ours(trainer):
    log, metrics = instrument(trainer), {}
    trainer._compute_metrics("batch", metrics)
    log.close()
    assert metrics["theirs"] == 1 and metrics["mux/requests"] == 30


def test_without_a_log_nothing_is_touched(trainer):
    trainer.config.actor_rollout_ref.rollout.custom.verl_mux.events_dir = None
    before = dict(vars(trainer))
    assert instrument(trainer) is None and vars(trainer) == before


# ---------------------------------------------------------------- the training trigger


class Buffer(TriggeredReplayBuffer):
    """Groups become ready one poll after the other, as `coming` says; what is taken is gone."""

    there = 0

    def wait_for_sampleable(self, global_steps, partition_id, target_count):
        self.there += self.coming.pop(0) if self.coming else 0
        return set(range(self.there)), {"training/off_policy/evicted_samples": 1}

    def _wait_for_next_poll(self, partition_id, last_debug_time):
        return last_debug_time


def buffer_of(coming: list[int], trigger: TrainingTrigger | None = None) -> Buffer:
    made = made_buffer(Buffer, "colocate_async")
    made.coming, made.trigger = list(coming), trigger
    return made


@pytest.fixture
def handed_out(monkeypatch):
    """Sizes that verl's own `sample` was asked for."""
    sizes = []

    def sample(self, global_steps, partition_id, batch_size):
        sizes.append(batch_size)
        if hasattr(self, "there") and partition_id != "val":
            self.there -= batch_size
        return f"batch of {batch_size}", {}

    monkeypatch.setattr(MuxReplayBuffer, "sample", sample)
    return sizes


def test_it_waits_for_enough_groups_and_takes_no_more_than_a_batch(handed_out):
    buffer = buffer_of([1, 2, 1, 9], TrainingTrigger(4, 1000))
    batch, metrics = buffer.sample(1, "train", batch_size=8)
    assert (batch, metrics["training/off_policy/evicted_samples"]) == ("batch of 4", 3)
    buffer.sample(1, "train", batch_size=8)
    assert handed_out == [4, 8]
    assert (buffer.there, buffer.taken) == (1, 12)
    assert buffer.take_figures() == {"groups": 12, "waited": 0, "n_min": 4, "t_max_s": 1000, "mood": 0.0}


def test_it_goes_on_with_one_group_when_it_waited_long_enough(handed_out):
    buffer = buffer_of([1], TrainingTrigger(4, 1e-9))
    buffer.sample(1, "train", batch_size=8)
    assert handed_out == [1]
    assert buffer.take_figures()["waited"] == 1


def test_validation_and_what_comes_before_training_take_whole_batches(handed_out):
    buffer = buffer_of([1])
    buffer.sample(0, "train", batch_size=8)
    buffer.trigger = TrainingTrigger(4, 1000)
    buffer.sample(1, "val", batch_size=30)
    assert handed_out == [8, 30]


def test_as_many_prompts_go_out_as_were_taken_and_entropy_moves_the_thresholds(handed_out, monkeypatch):
    buffer, added = buffer_of([5]), []
    trainer = SimpleNamespace(
        replay_buffer=buffer,
        config=OmegaConf.create({"data": {"train_batch_size": 8}}),
        global_steps=1,
        _add_prompts_to_generate=added.append,
        _resolve_filter_groups_metric=lambda: "acc",
        _compute_metrics=lambda batch, metrics: metrics.update({"actor/entropy": 2.5}),
    )
    keys = TriggerConfig(n_min=4, entropy=(0.5, 2.0))
    monkeypatch.setattr(module, "load", lambda _: MuxConfig(rollout=RolloutConfig(trigger=keys)))
    attach_trigger(trainer, SimpleNamespace(agent_loop_workers=[]))
    assert buffer.filter_groups_metric == "acc"

    trainer._add_batch_to_generate()
    buffer.sample(1, "train", 8)
    trainer._add_batch_to_generate()
    assert added == [8, 5] and buffer.taken == 0
    trainer._compute_metrics("batch", metrics := {})
    assert metrics["mux/rollout/trigger/mood"] == -1.0
    assert (metrics["mux/rollout/trigger/n_min"], metrics["mux/rollout/trigger/t_max_s"]) == (2, 30.0)


def test_a_trainer_with_another_buffer_is_left_alone():
    trainer = SimpleNamespace(replay_buffer=object())
    attach_trigger(trainer, None)
    assert vars(trainer).keys() == {"replay_buffer"}


def streaming(**changes):
    config = verl_config(
        {"rollout": {"trigger": {"n_min": 32}}},
        trainer__v1__trainer_mode="colocate_async",
        trainer__v1__sampler={"custom_sampler": {"path": None, "name": None}},
        trainer__default_local_dir="checkpoints",
        data={"train_batch_size": 32},
        actor_rollout_ref__rollout__agent={"agent_loop_manager_class": None},
    )
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value)
    return config


def test_the_trigger_comes_in_as_verls_custom_sampler():
    config = streaming()
    complete_stock_mode(config)
    assert config.trainer.v1.sampler.custom_sampler.name == "TriggeredReplayBuffer"
    assert config.actor_rollout_ref.rollout.agent.agent_loop_manager_class.endswith("MuxAgentLoopManager")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trainer__v1__sampler__custom_sampler__path": "mine.py"}, "custom_sampler.path=mine.py must be null"),
        ({"data__train_batch_size": 8}, "trigger.n_min=32 is not possible; allowed: 1 to data.train_batch_size=8"),
        ({"trainer__v1__trainer_mode": "sync"}, "allowed trainer modes: colocate_async, separate_async"),
        (
            {"mux__rollout__trigger__entropy": [0.5, 2.0], "algorithm__rollout_correction": {"bypass_mode": True}},
            "trigger.entropy=[0.5, 2.0] needs the entropy",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(changes, said):
    with pytest.raises(UserError) as error:
        complete_stock_mode(streaming(**changes))
    assert said in str(error.value) and "\n" not in str(error.value)
