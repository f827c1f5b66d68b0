"""The trainer's side of rollout control, over two simulated workers in virtual time. Ray is played by the simulation."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest

from verl_mux.profiling.eventlog.log import NULL_LOG
from verl_mux.rollout.control import rollout_control as module
from verl_mux.rollout.control.lag_limit import LagLimit
from verl_mux.rollout.control.oversampling import Oversampler, OversamplingPolicy
from verl_mux.rollout.control.rollout_control import RolloutControl
from verl_mux.rollout.control.segment_steps import SegmentSteps
from verl_mux.rollout.control.segments import SegmentLimits
from verl_mux.rollout.messages import Abort, Report

SAMPLES = 2
LIMITS = SegmentLimits(10, 4, 40)


class Rows:
    """Enough of a batch: its uids, and rows by index."""

    def __init__(self, uids):
        self.uids = list(uids)

    def __getitem__(self, key):
        return np.array(self.uids, dtype=object) if key == "uid" else Rows([self.uids[i] for i in key])


class Reference:
    def __init__(self, worker) -> None:
        self.worker = worker


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
        self.start[key] = self.tokens[key] = 0 if plan.restart else plan.kept

    def cut(self, key):
        if key in self.running:
            self._say("paused", key, "abort")

    def _say(self, kind, key, why):
        del self.running[key]
        self.queue.append(Report(kind, *key, self.tokens[key] - self.start[key], self.tokens[key], self.version, why))


class Ray:
    """The two calls that the control makes; whoever has something to do answers first."""

    @staticmethod
    def wait(references, num_returns):
        return [next((r for r in references if r.worker.queue or r.worker.running), references[0])], []

    @staticmethod
    def get(references):
        return [reference.worker.take_reports() for reference in references]


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

    def forget(self, groups):
        self.forgotten += self._taken_off(groups)

    def drop(self, groups):
        self.dropped += self._taken_off(groups)

    def _taken_off(self, groups):
        for group in groups:
            del self.worker_of[group]
        return groups

    def saved_calls(self, groups):
        return {}


class Job:
    """Steps of a job with `machine`."""

    def __init__(
        self, machine, length, restart=False, longest=None, manager=None, log=NULL_LOG, on_progress=lambda done, total: None
    ) -> None:  # fmt: skip
        self.done: list[tuple[str, int]] = []
        self.manager, self.drawn, self.cleared, self.step_number = manager or Manager(length), 0, set(), 0
        self.control = RolloutControl(
            machine, self.manager, draw=self._draw, submit=self._submit, clear=self.cleared.update,
            on_progress=on_progress, log=log, restart=restart, longest=longest, samples=SAMPLES,
            on_done=lambda group, tokens: self.done.append((group, tokens)),
        )  # fmt: skip

    def _draw(self, count):
        uids = [f"g{self.drawn + i}" for i in range(count)]
        self.drawn += count
        return Rows(uids)

    def _submit(self, batch, launches):
        self.manager.launch(launches, batch)

    def step(self, wanted):
        self.step_number += 1
        for worker in self.manager.agent_loop_workers:
            worker.version = self.step_number
        self.control.begin(self.step_number, wanted)
        return self.control.run()


@pytest.fixture(autouse=True)
def simulated_ray(monkeypatch):
    monkeypatch.setattr(module, "ray", Ray)


def length(uid):
    return 40 if int(uid[1:]) % 4 == 0 else 8


def test_over_sampling_trains_the_first_to_end_and_requeues_the_rest():
    job = Job(Oversampler(OversamplingPolicy(rate=0.5), SAMPLES), length)
    groups = job.step(4)
    assert sorted(groups) == ["g1", "g2", "g3", "g5"]
    job.manager.launched.clear()
    job.step(4)
    assert {plan.group for plan in job.manager.launched[:4]} == {"g0", "g4"}
    assert all(plan.kept > 0 for plan in job.manager.launched[:4])
    assert job.manager.launched[0].priority > job.manager.launched[-1].priority
    assert job.manager.forgotten[:4] == groups


def test_the_steps_log_line_counts_samples_in_all_its_numbers():
    lines = []
    log = SimpleNamespace(log=lambda event, seconds, extra, step: lines.append(extra))
    Job(Oversampler(OversamplingPolicy(), SAMPLES), length, log=log).step(4)
    assert lines == [{"total_requests": 8, "target_completion": 8, "completed_count": 8}]


def test_a_sample_that_fails_and_starts_again_is_counted_once():
    lines, told = [], []
    log = SimpleNamespace(log=lambda event, seconds, extra, step: lines.append(extra))
    job = Job(Oversampler(OversamplingPolicy(), SAMPLES), length, log=log, on_progress=lambda *it: told.append(it))
    job.manager.agent_loop_workers[0].failing = {("g0", 0), ("g2", 1)}
    job.step(4)
    assert lines == [{"total_requests": 8, "target_completion": 8, "completed_count": 8}]
    assert {total for _, total in told} == {8} and told[-1] == (8, 8)


def test_lengths_are_told_while_the_step_runs():
    job = Job(Oversampler(OversamplingPolicy(rate=0.5), SAMPLES), length)
    job.step(4)
    assert sorted(job.done) == sorted((group, 8) for group in ("g1", "g2", "g3", "g5") for _ in range(SAMPLES))


def test_restart_says_so_to_the_workers():
    job = Job(Oversampler(OversamplingPolicy(rate=0.5, tokens="restart"), SAMPLES), length, restart=True)
    job.step(4)
    job.manager.launched.clear()
    job.step(4)
    left_over = [plan for plan in job.manager.launched if plan.group in ("g0", "g4")]
    assert all(plan.restart and plan.kept == 0 and plan.step == 2 for plan in left_over)
    assert not any(plan.restart for plan in job.manager.launched if plan.group not in ("g0", "g4"))


def test_drop_gives_the_rest_up():
    job = Job(Oversampler(OversamplingPolicy(rate=0.5, leftover="drop"), SAMPLES), length)
    job.step(4)
    assert sorted(job.manager.dropped) == ["g0", "g4"] == sorted(job.cleared)


def test_segments_go_on_in_later_steps():
    limits = SegmentLimits(10, 4, 40)
    job = Job(SegmentSteps(limits, SAMPLES), length, longest=limits.longest)
    trained = [group for _ in range(6) for group in job.step(4)]
    assert len(trained) == 24 and len(set(trained)) == 24
    assert all(plan.budget == 10 and plan.longest == 40 for plan in job.manager.launched)


@pytest.mark.parametrize("kind", ["oversample", "segments"])
def test_a_checkpoint_brings_the_left_over_groups_back_first(kind):
    limits = SegmentLimits(10, 4, 40)

    def machine(saved=None):
        if kind == "oversample":
            policy = OversamplingPolicy(rate=0.5)
            return Oversampler.from_dict(policy, SAMPLES, saved) if saved else Oversampler(policy, SAMPLES)
        return SegmentSteps.from_dict(limits, SAMPLES, saved) if saved else SegmentSteps(limits, SAMPLES)

    job = Job(machine(), length, longest=40 if kind == "segments" else None)
    job.step(4)
    waiting = [f"g{i}" for i in range(job.drawn) if f"g{i}" not in job.manager.forgotten]
    calls = {g: {str(s): [{"token_ids": [1] * 3}] for s in range(SAMPLES)} for g in waiting}
    saved = json.loads(json.dumps({**job.control.to_dict(waiting), "calls": calls}))
    later = Job(machine(saved["machine"]), length, longest=40 if kind == "segments" else None)
    later.drawn = job.drawn
    later.control.restore(Rows(waiting), {g: {int(s): c for s, c in its.items()} for g, its in saved["calls"].items()})
    later.step(4)
    order = list(dict.fromkeys(plan.group for plan in later.manager.launched))
    back = [group for group in order if group in waiting]
    assert back and order[: len(back)] == back


def resumed(machine, waiting):
    """A job that goes on with `machine` from a checkpoint; its calls are a token each."""
    job = Job(machine, length, longest=LIMITS.longest)
    job.control.restore(Rows(waiting), {group: {sample: [{"token_ids": [1]}] for sample in range(SAMPLES)} for group in waiting})
    return job


def test_a_checkpoints_group_that_is_ready_is_trained_without_a_launch():
    # Seven are ready in the step that trains four: three wait for the next, which no worker has after a resume.
    before = Job(SegmentSteps(LIMITS, SAMPLES), lambda uid: 8, longest=LIMITS.longest)
    before.control.machine.begin(4)
    before.control.machine.drawn([f"g{at}" for at in range(7)])
    for at, sample in itertools.product(range(7), range(SAMPLES)):
        before.control.machine.report(Report("done", f"g{at}", sample, 8, 8, 1, "eos"))
    ready = ["g4", "g5", "g6"]
    later = resumed(SegmentSteps.from_dict(LIMITS, SAMPLES, before.control.to_dict(ready)["machine"]), ready)
    later.drawn = 7
    assert later.step(4) == [*ready, "g7"]
    assert {plan.group for plan in later.manager.launched} == {"g7"}
    assert later.control.to_dict(ready)["calls"] == {}


@pytest.mark.parametrize("kind", ["oversample", "segments"])
def test_a_checkpoints_group_that_is_too_old_is_dropped_before_any_worker_has_it(kind):
    lag, policy = LagLimit(1, "drop"), OversamplingPolicy()
    if kind == "oversample":
        group = {"name": "g0", "cuts": 0, "failures": 0, "tokens": [3] * SAMPLES, "age": 1}
        machine = Oversampler.from_dict(policy, SAMPLES, {"groups": [group]}, lag)
    else:
        samples = [{"state": "unfinished", "segments": [[10, 1]], "truncated": False, "lost_tokens": 0}] * SAMPLES
        saved = {"groups": {"g0": samples}, "failures": {}, "extra": 0, "ages": {"g0": 1}}
        machine = SegmentSteps.from_dict(LIMITS, SAMPLES, saved, lag=lag)
    job = resumed(machine, ["g0"])
    job.drawn = 1
    assert job.step(2) == ["g1", "g2"]
    assert (job.manager.dropped, job.cleared, job.control.to_dict(["g0"])["calls"]) == ([], {"g0"}, {})


@pytest.mark.parametrize("most", [0, 1, 2, 4])
@pytest.mark.parametrize("strategy", ["protect", "wait", "drop"])
@pytest.mark.parametrize("kind", ["oversample", "segments"])
def test_whatever_the_limit_of_lag_each_step_trains_its_groups(kind, strategy, most):
    lag = LagLimit(most, strategy)
    if kind == "oversample":
        machine = Oversampler(OversamplingPolicy(rate=1.0, max_cuts=99), SAMPLES, lag)
    else:
        machine = SegmentSteps(LIMITS, SAMPLES, rate=1.0, lag=lag)
    job = Job(machine, length, longest=LIMITS.longest)
    trained = [group for _ in range(8) for group in job.step(4)]
    assert len(trained) == 32 == len(set(trained))


def test_new_groups_are_cut_off_only_when_a_worker_has_them():
    """A machine may give up what it has just drawn."""
    job = Job(Cutting(OversamplingPolicy(), SAMPLES), length)
    assert len(job.step(4)) == 4


class Cutting(Oversampler):
    def drawn(self, groups):
        return [*super().drawn(groups), Abort(groups[0], 0)]
