"""A controlled job's prompts in verl's own TransferQueue, without Ray: put there, and taken up again from a checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")
import torch
import transfer_queue as tq
from transfer_queue import interface
from transfer_queue.client import TransferQueueClient
from transfer_queue.controller import TransferQueueController
from transfer_queue.storage.simple_storage import SimpleStorageUnit
from verl.utils import tensordict_utils as tu

from verl_mux.config.rollout_keys import RolloutConfig
from verl_mux.coordinator.bus.messages import Member
from verl_mux.errors import UserError
from verl_mux.profiling.eventlog.log import NULL_LOG
from verl_mux.rollout.control import growth
from verl_mux.rollout.control.growth_plan import GrowthPolicy
from verl_mux.rollout.control.oversampling import OversamplingPolicy
from verl_mux.rollout.worker.agent_loop import MuxAgentLoopWorker
from verl_mux.trainer.replay_buffer import MuxReplayBuffer
from verl_mux.trainer.rollout_side import RolloutSide
from verl_mux.trainer.tail_door import stamped

BATCH, SAMPLES = 2, 2
CUTS = RolloutConfig(oversample=OversamplingPolicy(rate=0.5))


def of_actor(remote):
    """The class behind a Ray actor's."""
    return remote.__ray_metadata__.modified_class


@pytest.fixture
def queue(monkeypatch):
    controller, unit = of_actor(TransferQueueController)(), of_actor(SimpleStorageUnit)({})
    client = TransferQueueClient("trainer", controller.get_zmq_server_info())
    units = OmegaConf.create({"zmq_info": {"unit": unit.get_zmq_server_info()}}, flags={"allow_objects": True})
    client.initialize_storage_manager("SimpleStorage", units)
    monkeypatch.setattr(interface, "_TQ_CLIENT", client)
    yield
    client.close()


class Manager:
    """Remembers what was launched."""

    def __init__(self) -> None:
        self.batches, self.launched, self.known = [], [], set()

    def knows(self, group):
        return group in self.known

    def launch(self, launches, batch=None, calls=None):
        self.launched += launches
        if batch is not None:
            self.batches.append(batch)
            self.known |= set(batch["uid"])

    def saved_calls(self, groups):
        return {group: {sample: [] for sample in range(SAMPLES)} for group in groups if group in self.known}


class Trainer:
    """What the rollout side needs of one."""

    numbers = itertools.count()

    def __init__(self, folder, config=CUTS) -> None:
        rollout = {"n": SAMPLES, "max_num_seqs": 8, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "calculate_log_probs": False,
                   "agent": {"default_agent_loop": "single_turn_agent"}}  # fmt: skip
        self.config = OmegaConf.create({
            "data": {"train_batch_size": BATCH, "max_prompt_length": 8, "max_response_length": 40},
            "actor_rollout_ref": {"rollout": rollout},
            "trainer": {"default_local_dir": str(folder), "resume_mode": "auto",
                        "v1": {"sampler": {"max_off_policy_threshold": 8}}},
        })  # fmt: skip
        self.trainer_mode, self.global_steps, self.steps_per_epoch = "mux_separate", 1, 10
        self.agent_loop_manager = Manager()
        self.phases = SimpleNamespace(log=NULL_LOG)
        self.replay_buffer = MuxReplayBuffer(
            trainer_mode="mux_separate", trainer_config=OmegaConf.create(), max_off_policy_threshold=8,
            max_off_policy_strategy="drop", sampler_kwargs=None,
        )  # fmt: skip
        self.rollout = RolloutSide(self, config)

    def _next_train_batch(self, num_prompts=None):
        return self.rollout.next_batch(num_prompts)

    def tell_progress(self, done, total):
        pass

    def draw_from_data(self, count):
        indexes = [next(self.numbers) for _ in range(count)]
        columns = {"index": indexes, "raw_prompt": [[{"role": "user", "content": f"prompt {at}"}] for at in indexes],
                   "uid": [f"u{at}" for at in indexes]}  # fmt: skip
        arrays = {name: np.array([*values, None], dtype=object)[:-1] for name, values in columns.items()}
        arrays["dummy_tensor"] = torch.zeros(count, 1, dtype=torch.uint8)  # as verl's dataset gives for each prompt
        return stamped(tu.get_tensordict(arrays), self.global_steps)


class Worker(MuxAgentLoopWorker):
    """Starts prompts as verl does and runs none."""

    def __init__(self, config) -> None:
        self.config, self.background_tasks, self.started, self._prompts = config, set(), [], 0

    async def _run_prompt(self, prompt, sampling_params, trajectory, trace=False):
        self.started.append((prompt["uid"], trajectory["step"], trajectory["sample_index"]))

    async def start(self, batch):
        await self.generate_sequences(batch)
        await asyncio.gather(*self.background_tasks)


def test_a_resumed_jobs_workers_start_the_checkpoints_prompts_for_the_step_that_resumes(queue, tmp_path):
    first = Trainer(tmp_path)
    with first.rollout.running():
        first.rollout.control.begin(1, BATCH)
        first.rollout.save()

    again = Trainer(tmp_path)
    again.rollout.load()
    with again.rollout.running():
        again.global_steps = 2
        assert again.rollout.restore_waiting("train") == 3
        again.rollout.control.begin(2, BATCH)

    (batch,) = again.agent_loop_manager.batches
    worker = Worker(again.config)
    asyncio.run(worker.start(batch))
    assert worker.started == [(uid, 2, int(uid[1:])) for uid in first.agent_loop_manager.batches[0]["uid"]]
    assert {tag["status"] for tag in tq.kv_list("train")["train"].values()} == {"pending"}


@pytest.mark.parametrize("fails", [False, True])
def test_a_node_that_is_lent_is_the_jobs_until_its_engines_are_gone(tmp_path, monkeypatch, fails):
    """As its own nodes are: the client that asks for it names the engines' processes, and fails with the job."""
    monkeypatch.setattr(growth.ray, "get", lambda answers: answers)
    trainer, engine, told = Trainer(tmp_path, RolloutConfig(growth=GrowthPolicy(own=["r0"]))), Member("h", 9, 1, "b"), []
    trainer.join = trainer.part = None
    trainer.phases.device = contextlib.nullcontext
    trainer.rollout_server_manager = SimpleNamespace(
        get_replicas=lambda: [SimpleNamespace(nodes=("r0",)), SimpleNamespace(nodes=("r1",))], server_addresses=["a", "b"],
        server_handles=["A", "B"], processes=lambda: [engine],
        global_load_balancer=SimpleNamespace(remove_servers=SimpleNamespace(remote=told.append)),
    )  # fmt: skip
    names = ("members", "close", "fail")
    trainer.connect_to_grow = lambda unit: SimpleNamespace(
        job=unit.nodes, **{name: lambda *it, name=name: told.append((name, *it)) for name in names}
    )
    with pytest.raises(KeyError) if fails else contextlib.nullcontext(), trainer.rollout.running():
        assert trainer.rollout.own_nodes == ["r0"] and trainer.rollout.lent_replicas == [1]
        assert told == [("members", [engine]), ["b"]]
        if fails:
            raise KeyError
    assert told[2:] == ([("fail", "its job ended with KeyError")] if fails else [("close",)])


def test_a_replica_of_which_the_job_would_own_a_part_is_refused(tmp_path):
    """Its engine would be woken on a node that nobody gave it."""
    trainer = Trainer(tmp_path, RolloutConfig(growth=GrowthPolicy(own=["r0"])))
    trainer.rollout_server_manager = SimpleNamespace(
        get_replicas=lambda: [SimpleNamespace(nodes=("r0", "r1"))], server_addresses=["a"], server_handles=["A"]
    )
    with pytest.raises(UserError, match="replica 0 runs on r0, r1; allowed: all nodes of a replica, or none"):
        trainer.rollout._start()
