"""What the replay buffer reports of a rollout that verl carries through."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
from verl.trainer.ppo.v1 import replay_buffer as of_verl

from tests.trainer.fencing import made_buffer
from verl_mux.trainer import replay_buffer as module


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
