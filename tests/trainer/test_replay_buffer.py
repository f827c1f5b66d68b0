"""What the replay buffer reports of a rollout that verl carries through; how many prompt groups the trigger's buffer hands
out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")
from verl.trainer.ppo.v1 import replay_buffer as of_verl

from tests.config.test_schema import verl_config
from verl_mux.config.preflight import complete_stock_mode
from verl_mux.config.schema import MuxConfig, RolloutConfig, TriggerConfig
from verl_mux.errors import UserError
from verl_mux.rollout.control.trigger import TrainingTrigger
from verl_mux.trainer import replay_buffer as module
from verl_mux.trainer.replay_buffer import MuxReplayBuffer, TriggeredReplayBuffer, attach_trigger


class Queue:
    """TransferQueue's tags: two prompts run, and in each look one more of the `coming` trajectories is there."""

    def __init__(self, partition: str, coming: list[str]) -> None:
        self.partition, self.coming, self.there = partition, coming, []

    def kv_list(self):
        status = "running" if self.coming else "finished"
        prompts = {uid: {"is_prompt": True, "status": status, "global_steps": 1} for uid in ("a", "b")}
        items = prompts | {key: {"status": "success"} for key in self.there}
        self.there += self.coming[:1]
        del self.coming[:1]
        return {self.partition: items}

    def kv_clear(self, **what):
        pass


def made() -> MuxReplayBuffer:
    return MuxReplayBuffer(
        trainer_mode="mux_separate", trainer_config=OmegaConf.create(), max_off_policy_threshold=8,
        max_off_policy_strategy="drop", sampler_kwargs=None,
    )  # fmt: skip


def test_the_order_of_dropped_prompts_is_forgotten(monkeypatch):
    monkeypatch.setattr(of_verl, "tq", Queue("train", []))
    buffer = made()
    buffer.submitted(["a", "b"])
    buffer.clear_groups({"a"})
    assert buffer._order == {"b": 1}


def test_progress_is_of_the_samples_that_are_waited_for(monkeypatch):
    monkeypatch.setattr(module, "ray", SimpleNamespace(wait=lambda refs, num_returns: ([], [])))
    noted = []
    buffer = made()
    mux = SimpleNamespace(progress=lambda *it: noted.append(it))
    buffer.start([], mux=mux, samples_of_prompt={"train": 2, "val": 1})
    a_step = ["a_0_0", "a_0_1", "a_1_0", "b_0_0", "b_1_0"]  # a's first sample has two trajectories
    for partition, coming, expected in [
        ("val", ["b_0_0", "a_0_0"], [(0, 2), (1, 2), (2, 2)]),
        ("train", a_step, [(0, 4), (1, 4), (1, 4), (2, 4), (3, 4), (4, 4)]),
        ("train", a_step, [(0, 4), (1, 4), (1, 4), (2, 4), (3, 4), (4, 4)]),
    ]:
        monkeypatch.setattr(of_verl, "tq", Queue(partition, list(coming)))
        buffer.sample(1, partition, batch_size=2)
        assert noted == expected
        noted.clear()


# ---------------------------------------------------------------- the training trigger


class Buffer(TriggeredReplayBuffer):
    """Groups become ready one poll after the other, as `coming` says; what is taken is gone."""

    def __init__(self, coming: list[int]) -> None:
        super().__init__(
            trainer_mode="colocate_async", trainer_config=OmegaConf.create(), max_off_policy_threshold=8,
            max_off_policy_strategy="drop", sampler_kwargs=None, refill_fn=None,
        )  # fmt: skip
        self.coming, self.there = list(coming), 0

    def wait_for_sampleable(self, global_steps, partition_id, target_count):
        self.there += self.coming.pop(0) if self.coming else 0
        return set(range(self.there)), {"training/off_policy/evicted_samples": 1}

    def _wait_for_next_poll(self, partition_id, last_debug_time):
        return last_debug_time


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
    buffer = Buffer([1, 2, 1, 9])
    buffer.use(TrainingTrigger(4, 1000))
    batch, metrics = buffer.sample(1, "train", batch_size=8)
    assert (batch, metrics["training/off_policy/evicted_samples"]) == ("batch of 4", 3)
    buffer.sample(1, "train", batch_size=8)
    assert handed_out == [4, 8]
    assert (buffer.there, buffer.take_taken(), buffer.take_taken()) == (1, 12, 0)
    assert buffer.take_figures() == {"groups": 12, "waited": 0, "n_min": 4, "t_max_s": 1000, "mood": 0.0}


def test_it_goes_on_with_one_group_when_it_waited_long_enough(handed_out):
    buffer = Buffer([1])
    buffer.use(TrainingTrigger(4, 1e-9))
    buffer.sample(1, "train", batch_size=8)
    assert handed_out == [1]
    assert buffer.take_figures()["waited"] == 1


def test_validation_and_what_comes_before_training_take_whole_batches(handed_out):
    buffer = Buffer([1])
    buffer.sample(0, "train", batch_size=8)
    buffer.use(TrainingTrigger(4, 1000))
    buffer.sample(1, "val", batch_size=30)
    assert handed_out == [8, 30]


def test_as_many_prompts_go_out_as_were_taken_and_entropy_moves_the_thresholds(handed_out, monkeypatch):
    buffer, added = Buffer([5]), []
    trainer = SimpleNamespace(
        replay_buffer=buffer,
        config=OmegaConf.create({"data": {"train_batch_size": 8}}),
        global_steps=1,
        _add_prompts_to_generate=added.append,
        _compute_metrics=lambda batch, metrics: metrics.update({"actor/entropy": 2.5}),
    )
    keys = TriggerConfig(n_min=4, entropy=(0.5, 2.0))
    monkeypatch.setattr(module, "load", lambda _: MuxConfig(rollout=RolloutConfig(trigger=keys)))
    attach_trigger(trainer, SimpleNamespace(agent_loop_workers=[]))

    trainer._add_batch_to_generate()
    buffer.sample(1, "train", 8)
    trainer._add_batch_to_generate()
    assert added == [8, 5]
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
