"""A step's rollout over two simulated workers in virtual time, where the simulation plays Ray; and its prompts in verl's own
TransferQueue, put there, and taken up again from a checkpoint."""

from __future__ import annotations

import asyncio
import itertools
import json
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")
import torch
import transfer_queue as tq
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu

from tests.trainer.fencing import made_buffer
from verl_mux.config.schema import OversampleConfig, RolloutConfig, SegmentsConfig
from verl_mux.errors import Failure
from verl_mux.profiling.eventlog.log import NULL_LOG
from verl_mux.rollout.control.oversampling import Oversampler
from verl_mux.rollout.instructions import Abort, Report
from verl_mux.rollout.worker.agent_loop import MuxAgentLoopWorker
from verl_mux.trainer import step_rollout as module
from verl_mux.trainer.prompts import Prompts, stamped
from verl_mux.trainer.replica_moves import ReplicaMoves
from verl_mux.trainer.step_rollout import StepRollout, load

BATCH, SAMPLES = 2, 2
SEGMENTS = SegmentsConfig(segment_length=10)


class Rows:
    """Enough of a batch: its uids, and rows by index."""

    def __init__(self, uids):
        self.uids = list(uids)

    def __getitem__(self, key):
        return np.array(self.uids, dtype=object) if key == "uid" else Rows([self.uids[i] for i in key])

    def items(self):
        return []

    def select(self):
        return self


class Reference(NamedTuple):
    worker: object


class Worker:
    """Runs every sample a token at a time, `length(uid)` tokens each, until it has something to report."""

    def __init__(self, length) -> None:
        self.length, self.version, self.failing = length, 0, set()
        self.running, self.start, self.tokens, self.queue = {}, {}, {}, []
        self.reports = SimpleNamespace(remote=lambda timeout: Reference(self))

    def take_reports(self):
        while not self.queue and self.running:
            for key, plan in list(self.running.items()):
                self._token(key, plan)
        taken, self.queue = self.queue, []
        return taken

    def _token(self, key, plan):
        self.tokens[key] += 1
        if key in self.failing:
            self.failing.discard(key)
            self._say("failed", key, "failed")
        elif self.tokens[key] >= self.length(key[0]):
            self._say("done", key, "eos")
        elif self.tokens[key] == plan.longest:
            self._say("done", key, "length")
        elif plan.budget == self.tokens[key] - self.start[key]:
            self._say("paused", key, "length")

    def launch(self, plan):
        key = (plan.group, plan.sample)
        self.running[key] = plan
        self.start[key] = self.tokens[key] = plan.kept

    def cut(self, key):
        if key in self.running:
            self._say("paused", key, "abort")

    def _say(self, kind, key, why):
        del self.running[key]
        self.queue.append(Report(kind, *key, self.tokens[key] - self.start[key], self.tokens[key], self.version, why))


class Manager:
    """MuxAgentLoopManager's face over simulated workers."""

    def __init__(self, length) -> None:
        self.agent_loop_workers = [Worker(length), Worker(length)]
        self.worker_of, self.launched, self.forgotten, self.dropped = {}, [], [], []

    def knows(self, group):
        return group in self.worker_of

    def launch(self, launches, batch=None, calls=None):
        for at, uid in enumerate(batch["uid"] if batch is not None else ()):
            self.worker_of[uid] = self.agent_loop_workers[at % 2]
        for launch in launches:
            self.launched.append(launch)
            self.worker_of[launch.group].launch(launch)

    def cut(self, samples):
        for sample in samples:
            self.worker_of[sample[0]].cut(sample)

    def forget(self, groups, noted=None):
        (self.forgotten if noted is None else noted).extend(groups)
        for group in groups:
            del self.worker_of[group]

    def drop(self, groups):
        self.forget(groups, self.dropped)

    def saved_calls(self, groups):
        return {}


class Simulated:
    """Steps of a job with these keys of `mux.rollout`, over simulated workers."""

    def __init__(
        self, length, log=NULL_LOG, on_progress=lambda done, total: None, saved=None, lag=9, dull=(), most=10**6, **keys
    ) -> None:  # fmt: skip
        self.manager, self.drawn, self.cleared, self.step_number = Manager(length), 0, set(), 0
        trainer = SimpleNamespace(
            config=config("nowhere", lag + 1), agent_loop_manager=self.manager, global_steps=1,
            replay_buffer=SimpleNamespace(
                clear_groups=self.cleared.update, waiting_groups=list, is_filtered=set(dull).__contains__
            ),
        )  # fmt: skip
        self.most = most  # prompts in all
        prompts = SimpleNamespace(
            next_batch=self._draw, room=lambda count: min(count, self.most - self.drawn),
            order=SimpleNamespace(forget=lambda uids: None),
        )  # fmt: skip
        phases = SimpleNamespace(log=log, mux=SimpleNamespace(progress=on_progress))
        watch = SimpleNamespace(check=lambda: None)
        self.rollout = StepRollout(trainer, RolloutConfig(**keys), prompts, phases, watch, ReplicaMoves(), saved)
        self.rollout._put_prompts = lambda uids, fields=None: None

    def _draw(self, count):
        uids = [f"g{self.drawn + i}" for i in range(count)]
        self.drawn += count
        return Rows(uids)

    def step(self, wanted):
        self.step_number += 1
        for worker in self.manager.agent_loop_workers:
            worker.version = self.step_number
        self.rollout.begin(self.step_number, wanted)
        return self.rollout.run()


def config(folder, threshold=8):
    """verl's, as far as a step's rollout reads it."""
    rollout = {"n": SAMPLES, "max_num_seqs": 8, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "calculate_log_probs": False,
               "agent": {"default_agent_loop": "single_turn_agent"}}  # fmt: skip
    return OmegaConf.create({
        "algorithm": {}, "data": {"train_batch_size": BATCH, "max_prompt_length": 8, "max_response_length": 40},
        "actor_rollout_ref": {"rollout": rollout},
        "trainer": {"default_local_dir": str(folder), "resume_mode": "auto",
                    "v1": {"sampler": {"max_off_policy_threshold": threshold}}},
    })  # fmt: skip


@pytest.fixture(autouse=True)
def simulated_ray(monkeypatch):
    """The two calls that the control makes; the side that has something to do answers first."""
    busy = lambda refs: next((it for it in refs if it.worker.queue or it.worker.running), refs[0])  # noqa: E731
    get = lambda references: [it.worker.take_reports() for it in references]  # noqa: E731
    monkeypatch.setattr(module, "ray", SimpleNamespace(wait=lambda references, num_returns: ([busy(references)], []), get=get))


def length(uid):
    return 40 if int(uid[1:]) % 4 == 0 else 8


def over(rate=0.5, **more):
    return {"oversample": OversampleConfig(rate=rate, **more)}


def test_over_sampling_trains_the_first_to_end_and_requeues_the_rest():
    job = Simulated(length, **over())
    groups = job.step(4)
    assert sorted(groups) == ["g1", "g2", "g3", "g5"]
    job.manager.launched.clear()
    job.step(4)
    assert {plan.group for plan in job.manager.launched[:4]} == {"g0", "g4"}
    assert all(plan.kept > 0 for plan in job.manager.launched[:4])
    assert job.manager.launched[0].priority > job.manager.launched[-1].priority
    assert job.manager.forgotten[:4] == groups


def test_the_steps_log_line_counts_samples_in_all_its_numbers_and_one_that_failed_and_starts_again_once():
    lines, progress = [], []
    log = SimpleNamespace(log=lambda event, seconds, extra, step: lines.append(extra))
    job = Simulated(length, log=log, on_progress=lambda *it: progress.append(it))
    job.manager.agent_loop_workers[0].failing = {("g0", 0), ("g2", 1)}
    job.step(4)
    assert lines == [{"total_requests": 8, "target_completion": 8, "completed_count": 8}]
    assert {total for _, total in progress} == {8} and progress[-1] == (8, 8)


def test_segments_go_on_in_later_steps():
    job = Simulated(length, segments=SEGMENTS)
    trained = [group for _ in range(6) for group in job.step(4)]
    assert len(trained) == 24 and len(set(trained)) == 24
    assert all(plan.budget == 10 and plan.longest == 40 for plan in job.manager.launched)


def resumed(saved, waiting, **keys):
    """A job that goes on from a checkpoint; its engine calls are a token each."""
    job = Simulated(length, saved={"machine": saved}, **keys)
    job.rollout._rows = Rows(waiting)
    job.rollout._calls = {group: {sample: [{"token_ids": [1]}] for sample in range(SAMPLES)} for group in waiting}
    return job


@pytest.mark.parametrize("keys", [over(), {"segments": SEGMENTS}], ids=["oversample", "segments"])
def test_a_checkpoint_brings_the_left_over_groups_back_first(keys):
    job = Simulated(length, **keys)
    job.step(4)
    waiting = [f"g{i}" for i in range(job.drawn) if f"g{i}" not in job.manager.forgotten]
    later = resumed(json.loads(json.dumps(job.rollout.machine.to_dict())), waiting, **keys)
    later.drawn = job.drawn
    later.step(4)
    order = list(dict.fromkeys(plan.group for plan in later.manager.launched))
    back = [group for group in order if group in waiting]
    assert back and order[: len(back)] == back


def test_a_checkpoints_group_that_is_ready_is_trained_without_a_launch():
    # Seven are ready in the step that trains four: three wait for the next, which no worker has after a resume.
    machine = Simulated(lambda uid: 8, segments=SEGMENTS).rollout.machine
    machine.begin(4)
    machine.drawn([f"g{at}" for at in range(7)])
    for at, sample in itertools.product(range(7), range(SAMPLES)):
        machine.report(Report("done", f"g{at}", sample, 8, 8, 1, "eos"))
    ready = ["g4", "g5", "g6"]
    later = resumed(machine.to_dict(), ready, segments=SEGMENTS)
    later.drawn = 7
    assert later.step(4) == [*ready, "g7"]
    assert {plan.group for plan in later.manager.launched} == {"g7"}
    assert later.rollout._calls == {}


@pytest.mark.parametrize(
    ("keys", "drawn"), [({}, 6), (over(), 6), ({"segments": SEGMENTS}, 6)], ids=["whole", "oversample", "segments"]
)
def test_groups_without_a_signal_are_replaced_within_the_step(keys, drawn):
    job = Simulated(lambda uid: 8, dull=["g1", "g2"], **keys)
    assert job.step(4) == ["g0", "g3", "g4", "g5"]
    assert job.cleared == {"g1", "g2"} == set(job.manager.dropped) and job.drawn == drawn


@pytest.mark.parametrize("keys", [{}, over(), {"segments": SEGMENTS}], ids=["whole", "oversample", "segments"])
def test_a_step_that_finds_too_few_in_the_prompts_it_may_draw_says_so(keys):
    assert len(Simulated(lambda uid: 8, dull=["g1", "g2"], most=6, **keys).step(4)) == 4
    with pytest.raises(Failure, match=r"has drawn algorithm.filter_groups.max_num_gen_batches batches"):
        Simulated(lambda uid: 8, dull=["g1", "g2", "g4"], most=6, **keys).step(4)


class AlwaysFailing(set):
    def __contains__(self, key):
        return True


@pytest.mark.parametrize("keys", [{}, over(), {"segments": SEGMENTS}], ids=["whole", "oversample", "segments"])
def test_a_step_in_which_every_group_fails_ends_the_job_instead_of_drawing_for_ever(keys):
    job = Simulated(lambda uid: 8, **keys)
    for worker in job.manager.agent_loop_workers:
        worker.failing = AlwaysFailing()
    with pytest.raises(Failure, match="prompt groups failed one after the other and none succeeded"):
        job.step(4)


GROUP = {"name": "g0", "cuts": 0, "failures": 0, "tokens": [3] * SAMPLES, "age": 1}
UNFINISHED = [{"state": "unfinished", "segments": [[10, 1]], "truncated": False, "lost_tokens": 0}] * SAMPLES


@pytest.mark.parametrize(
    ("saved", "keys"),
    [
        ({"groups": [GROUP]}, over(1e-12)),
        ({"groups": {"g0": UNFINISHED}, "failures": {}, "extra": 0, "ages": {"g0": 1}}, {"segments": SEGMENTS}),
    ],
    ids=["oversample", "segments"],
)
def test_a_checkpoints_group_that_is_too_old_is_dropped_before_any_worker_has_it(saved, keys):
    job = resumed(saved, ["g0"], max_lag=1, max_lag_strategy="drop", **keys)
    job.drawn = 1
    assert job.step(2) == ["g1", "g2"]
    assert (job.manager.dropped, job.cleared, job.rollout._calls) == ([], {"g0"}, {})


@pytest.mark.parametrize("most", [0, 1, 2, 4])
@pytest.mark.parametrize("strategy", ["protect", "wait", "drop"])
@pytest.mark.parametrize("kind", ["oversample", "segments"])
def test_whatever_the_limit_of_lag_each_step_trains_its_groups(kind, strategy, most):
    keys = over(1.0, max_cuts=99) if kind == "oversample" else {**over(1.0), "segments": SEGMENTS}
    job = Simulated(length, max_lag=most, max_lag_strategy=strategy, **keys)
    trained = [group for _ in range(8) for group in job.step(4)]
    assert len(trained) == 32 == len(set(trained))


def test_new_groups_are_cut_off_only_when_a_worker_has_them():
    """A machine may give up what it has just drawn."""
    job = Simulated(length)
    job.rollout.machine = Cutting(SAMPLES)
    assert len(job.step(4)) == 4


class Cutting(Oversampler):
    def drawn(self, groups):
        return [*super().drawn(groups), Abort(groups[0], 0)]


# ---------------------------------------------------------------- in verl's TransferQueue


class Remembering:
    """A manager that remembers what was launched."""

    def __init__(self) -> None:
        self.batches, self.known, self.agent_loop_workers = [], set(), []

    def knows(self, group):
        return group in self.known

    def launch(self, launches, batch=None, calls=None):
        if batch is not None:
            self.batches.append(batch)
            self.known |= set(batch["uid"])

    def saved_calls(self, groups):
        return {group: {sample: [] for sample in range(SAMPLES)} for group in groups if group in self.known}


class Trainer:
    """What a step's rollout reads of verl's trainer."""

    numbers = itertools.count()

    def __init__(self, folder, saved=None) -> None:
        self.config, self.global_steps, self.steps_per_epoch = config(folder), 1, 10
        self.agent_loop_manager = Remembering()
        self.replay_buffer = made_buffer()
        keys = RolloutConfig(**over())
        self.rollout = StepRollout(
            self, keys, Prompts(self, keys), SimpleNamespace(log=NULL_LOG), SimpleNamespace(), ReplicaMoves(), saved
        )

    def draw(self, count):
        indexes = [next(self.numbers) for _ in range(count)]
        columns = {"index": indexes, "raw_prompt": [[{"role": "user", "content": f"prompt {at}"}] for at in indexes],
                   "uid": [f"u{at}" for at in indexes]}  # fmt: skip
        arrays = {name: np.array([*values, None], dtype=object)[:-1] for name, values in columns.items()}
        arrays["dummy_tensor"] = torch.zeros(count, 1, dtype=torch.uint8)  # as verl's dataset gives for each prompt
        return stamped(tu.get_tensordict(arrays), self.global_steps)


class Starting(MuxAgentLoopWorker):
    """Starts prompts as verl does and runs none."""

    def __init__(self, config) -> None:
        self.config, self.background_tasks, self.started, self._prompts = config, set(), [], 0

    async def _run_prompt(self, prompt, sampling_params, trajectory, trace=False):
        self.started.append((prompt["uid"], trajectory["step"], trajectory["sample_index"]))

    async def start(self, batch):
        await self.generate_sequences(batch)
        await asyncio.gather(*self.background_tasks)


def test_a_resumed_jobs_workers_start_the_checkpoints_prompts_for_the_step_that_resumes(queue, tmp_path, monkeypatch):
    monkeypatch.setattr(PPOTrainer, "_next_train_batch", Trainer.draw)
    first = Trainer(tmp_path)
    first.rollout.begin(1, BATCH)
    first.rollout.save(tmp_path)

    again = Trainer(tmp_path, load(tmp_path))
    again.global_steps = 2
    assert again.rollout.restore_waiting("train") == 3
    again.rollout.begin(2, BATCH)

    (batch,) = again.agent_loop_manager.batches
    worker = Starting(again.config)
    asyncio.run(worker.start(batch))
    assert worker.started == [(uid, 2, int(uid[1:])) for uid in first.agent_loop_manager.batches[0]["uid"]]
    assert {tag["status"] for tag in tq.kv_list("train")["train"].values()} == {"pending"}
