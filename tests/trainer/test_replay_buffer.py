"""What the replay buffer reports of a rollout that verl carries through."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")
import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1 import replay_buffer as of_verl
from verl.trainer.ppo.v1.replay_buffer import DAPO_FILTERED_REWARD_COUNTS_KEY, ReplayBuffer

from tests.trainer.fencing import bare_trainer, made_buffer
from verl_mux.config.schema import RolloutConfig
from verl_mux.coordinator.bus.client import LocalMux
from verl_mux.errors import Failure
from verl_mux.profiling.eventlog import events
from verl_mux.trainer import replay_buffer as module
from verl_mux.trainer.prompts import Prompts
from verl_mux.trainer.replay_buffer import MuxReplayBuffer


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


def test_the_order_of_dropped_prompts_is_forgotten(monkeypatch):
    monkeypatch.setattr(of_verl, "tq", Queue("train", []))
    buffer = made_buffer()
    buffer.submitted(["a", "b"])
    buffer.clear_groups({"a"})
    assert buffer._order == {"b": 1}


def test_progress_is_of_the_samples_that_are_waited_for(monkeypatch):
    monkeypatch.setattr(module, "ray", SimpleNamespace(wait=lambda refs, num_returns: ([], [])))
    noted = []
    buffer = made_buffer()
    mux = SimpleNamespace(progress=lambda *it: noted.append(it))
    buffer.start([], mux=mux, samples_of_prompt={"train": 2, "val": 1})
    a_step = ["a_0_0", "a_0_1", "a_1_0", "b_0_0", "b_1_0"]  # a's first sample has two trajectories
    train = ("train", a_step, [(0, 4), (1, 4), (1, 4), (2, 4), (3, 4), (4, 4)])
    for partition, coming, expected in [("val", ["b_0_0", "a_0_0"], [(0, 2), (1, 2), (2, 2)]), train, train]:
        monkeypatch.setattr(of_verl, "tq", Queue(partition, list(coming)))
        buffer.sample(1, partition, batch_size=2)
        assert noted == expected
        noted.clear()


# ---------------------------------------------------------------- groups without a signal, in verl's TransferQueue

BATCH, SAMPLES, METRIC = 4, 2, "reward"
PROMPT = {"is_prompt": True, "global_steps": 1}


class Rollout:
    """Groups that are handed out, in their order, and end a few in each wait, long ones after the others; `dull` says which have
    no signal."""

    def __init__(self, dull, at_once: int, long=lambda number: False) -> None:
        self.dull, self.at_once, self.long, self.running, self.drawn, self.refills = dull, at_once, long, [], 0, []
        self.on_drawn = lambda names: None

    def draw(self, count: int) -> list[str]:
        names = [f"g{self.drawn + at}" for at in range(count)]
        tq.kv_batch_put(keys=names, partition_id="train", tags=[{**PROMPT, "status": "running"} for _ in names])
        self.drawn, self.running = self.drawn + count, [*self.running, *names]
        self.on_drawn(names)
        return names

    def refill(self, count: int) -> None:
        self.refills.append(count)
        self.draw(count)

    def go_on(self) -> None:
        self.running.sort(key=lambda name: self.long(int(name[1:])))
        ended, self.running = self.running[: self.at_once], self.running[self.at_once :]
        for name in ended:
            scores = torch.tensor([[0.0, 1.0], [0.0, 1.0 if self.dull(int(name[1:])) else 0.0]])
            keys = [f"{name}_{at}_0" for at in range(SAMPLES)]
            fields = TensorDict({"rm_scores": scores}, batch_size=SAMPLES)
            tq.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=[{"status": "success"}] * SAMPLES)
            tq.kv_batch_put(keys=[name], partition_id="train", tags=[{**PROMPT, "status": "finished"}])


def sampled(buffer: ReplayBuffer, rollout: Rollout):
    """The groups of the step's batch, and its metrics."""
    tq.kv_clear(partition_id="train", keys=list((tq.kv_list("train") or {}).get("train", {})) or ["none"])
    rollout.draw(BATCH)
    batch, metrics = buffer.sample(1, "train", BATCH)
    return sorted({key.split("_")[0] for key in batch.keys}, key=lambda name: int(name[1:])), metrics


def ours(rollout: Rollout, monkeypatch, batches: int = 1) -> MuxReplayBuffer:
    buffer = made_buffer()
    buffer.replace_filtered(METRIC, BATCH, batches)
    buffer.refill_fn, rollout.on_drawn = rollout.refill, buffer.submitted
    monkeypatch.setattr(module, "ray", SimpleNamespace(wait=lambda refs, num_returns: (rollout.go_on() or [], [])))
    return buffer


@pytest.mark.parametrize("fails", ["all", "all but one"])
def test_where_every_group_fails_the_job_ends_instead_of_drawing_others_for_ever(queue, monkeypatch, fails):
    class Broken(Rollout):
        def go_on(self):
            ended, self.running = self.running[: self.at_once], self.running[self.at_once :]
            for name in ended:
                well = fails == "all but one" and int(name[1:]) % 9 == 8
                tq.kv_batch_put(keys=[name], partition_id="train", tags=[{**PROMPT, "status": "finished" if well else "failure"}])
                if well:
                    tq.kv_batch_put(keys=[f"{name}_0_0"], partition_id="train", tags=[{"status": "success"}])

    rollout, buffer = Broken(lambda number: False, 2), made_buffer()
    buffer.refill_fn, rollout.on_drawn = rollout.refill, buffer.submitted
    monkeypatch.setattr(module, "ray", SimpleNamespace(wait=lambda refs, num_returns: (rollout.go_on() or [], [])))
    if fails == "all":
        with pytest.raises(Failure, match="12 prompt groups failed one after the other and none succeeded"):
            sampled(buffer, rollout)
    else:
        assert len(sampled(buffer, rollout)[0]) == BATCH


def of_sync(rollout: Rollout, monkeypatch, batches: int = 1) -> ReplayBuffer:
    """What verl's trainer mode `sync` makes."""
    monkeypatch.setattr(of_verl.time, "sleep", lambda seconds: rollout.go_on())
    return ReplayBuffer(
        "sync", OmegaConf.create(), 8, "drop", None, refill_fn=rollout.refill, filter_groups_metric=METRIC,
        train_batch_size=BATCH, gen_batch_size=1, max_inflight_gen_batches=batches,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_as_many_are_drawn_filtered_and_given_up_as_in_verls_sync(queue, monkeypatch, seed):
    chosen = random.Random(seed)
    share, at_once, batches = chosen.choice([0.2, 0.5, 0.8]), chosen.choice([1, 3, 9]), chosen.choice([1, 2])
    dull = {at for at in range(500) if chosen.random() < share}
    odd = {at for at in range(500) if chosen.random() < 0.5}
    long = (set(), dull, set(range(500)) - dull, odd)[seed % 4]
    made = [Rollout(dull.__contains__, at_once, long.__contains__) for _ in range(2)]
    theirs, verls = sampled(of_sync(made[0], monkeypatch, batches), made[0])
    mine, metrics = sampled(ours(made[1], monkeypatch, batches), made[1])
    assert (metrics, made[1].refills) == (verls, made[0].refills)
    informative = [f"g{at}" for at in range(made[1].drawn) if at not in dull]
    assert mine == informative[:BATCH], "those that were drawn first"
    assert len(theirs) == BATCH and set(theirs) <= set(informative), "verl takes any"


def test_a_step_that_may_draw_no_more_says_so_when_nothing_is_under_way(queue, monkeypatch):
    rollout = Rollout(lambda at: at != 2, at_once=1)
    buffer = ours(rollout, monkeypatch)
    buffer.refill_fn = lambda count: 0
    with pytest.raises(Failure, match=r"has drawn algorithm.filter_groups.max_num_gen_batches batches"):
        sampled(buffer, rollout)


def test_a_group_of_a_controlled_rollout_is_judged_when_it_is_complete_and_counted(queue, monkeypatch):
    rollout = Rollout(lambda at: at == 1, at_once=2)
    buffer = ours(rollout, monkeypatch)
    rollout.draw(4)
    rollout.go_on()
    assert [buffer.is_filtered(name) for name in ("g0", "g1")] == [False, True]
    buffer.start([], rollout=SimpleNamespace(run=lambda: ["g0"]))
    _, metrics = buffer.sample(1, "train", 1)
    assert metrics == {"training/filter_groups/evicted_samples": 1, DAPO_FILTERED_REWARD_COUNTS_KEY: {1.0: 1}}
    assert not made_buffer().is_filtered("g1"), "without the key"


def test_prompts_that_are_drawn_besides_are_bounded_and_logged(monkeypatch):
    lines = []
    log = SimpleNamespace(log=lambda event, extra, step: lines.append((event, extra, step)))
    groups = {"enable": True, "max_num_gen_batches": 2}
    config = {"algorithm": {"filter_groups": groups}, "data": {"train_batch_size": BATCH}}
    trainer = bare_trainer(config=OmegaConf.create(config), phases=SimpleNamespace(log=log, mux=LocalMux("a", {})))
    monkeypatch.setattr(Prompts, "_draw", lambda self, count: {"uid": [f"u{at}" for at in range(count)]})
    monkeypatch.setattr("verl_mux.trainer.prompts.prompts_of", lambda batch: [None] * len(batch["uid"]))
    trainer.replay_buffer, prompts = made_buffer(), Prompts(trainer, RolloutConfig())
    prompts.next_batch(None)
    assert prompts.room(3) == 3 and not lines
    prompts.next_batch(3)
    assert (prompts.room(5), lines) == (1, [(events.DRAWN_AGAIN, {"prompts": 3, "drawn": 4}, 1)])
    prompts.next_batch(1)
    assert prompts.room(5) == 0
    trainer.global_steps = 2
    assert prompts.room(9) == 8
