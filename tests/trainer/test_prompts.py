"""Prompts in tail rounds through verl's data loader and a checkpoint."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("verl")
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.utils import tensordict_utils as tu

from verl_mux.rollout.lengths.predictors import Fifo
from verl_mux.trainer.prompts import PromptWindow, stamped

BATCH, PROMPTS = 4, 18
STEPS_AN_EPOCH = PROMPTS // BATCH


class Data:
    """A shuffled data set behind verl's kind of loader, one prompt at a time; uids as verl gives them."""

    numbers = itertools.count()

    def __init__(self) -> None:
        rows = [{"index": at, "raw_prompt": [{"role": "user", "content": f"prompt {at}"}]} for at in range(PROMPTS)]
        self.loader = StatefulDataLoader(rows, batch_size=1, shuffle=True, collate_fn=lambda batch: batch, num_workers=0)
        self.iterator = None

    def draw(self, count):
        rows = [self._next() for _ in range(count)]
        columns = {name: np.array([row[name] for row in rows] + [None], dtype=object)[:-1] for name in ("index", "raw_prompt")}
        columns["uid"] = np.array([f"u{next(self.numbers)}" for _ in rows], dtype=object)
        return stamped(tu.get_tensordict(columns), 0)

    def _next(self):
        try:
            self.iterator = self.iterator or iter(self.loader)
            return next(self.iterator)[0]
        except StopIteration:
            self.iterator = iter(self.loader)
            return next(self.iterator)[0]


class Job:
    """A trainer's steps, as far as the window sees them. One prompt in six is long."""

    def __init__(self) -> None:
        self.step, self.data = 1, Data()
        self.window = PromptWindow(BATCH, 2, Fifo(), self.data.draw, self.data.loader)

    def run(self, count=BATCH):
        """One step: the prompts' numbers in the data set."""
        batch = stamped(self.window.next_batch(count, STEPS_AN_EPOCH - (self.step - 1) % STEPS_AN_EPOCH), self.step)
        assert batch["global_steps"] == self.step
        numbers = [int(index) for index in batch["index"]]
        lengths = {uid: [300, 310] if n % 6 == 0 else [20, 24] for uid, n in zip(batch["uid"], numbers, strict=True)}
        self.window.trained(lengths, epoch=(self.step - 1) // STEPS_AN_EPOCH)
        self.step += 1
        return numbers


def test_each_prompt_of_an_epoch_is_handed_out_once():
    job = Job()
    seen = [number for _ in range(3 * STEPS_AN_EPOCH) for number in job.run()]
    assert len(seen) == 3 * STEPS_AN_EPOCH * BATCH
    counts = np.bincount(seen, minlength=PROMPTS)
    assert counts.max() - counts.min() <= 1


def test_long_prompts_share_steps_once_they_are_known():
    job = Job()
    steps = [job.run() for _ in range(5 * STEPS_AN_EPOCH)]
    with_long = [any(n % 6 == 0 for n in its) for its in steps]
    assert sum(with_long[-STEPS_AN_EPOCH:]) <= 2
    figures = job.window.figures()
    assert figures["tail/window_left"] == 0
    assert figures["tail/step_mean_length_ratio"] > 0
    assert 0 < figures["tail/step_expected_length_ratio"] <= 2 + 1e-6
    assert figures["tail/steps_above_max_mean"] == 0


def test_a_lost_group_is_replaced_by_one_of_the_next_round():
    job = Job()
    first = job.run()
    more = job.run(count=1)
    assert len(more) == 1 and not set(more) & set(first)


def test_what_is_known_of_a_group_that_was_given_up_goes_with_its_step():
    job = Job()
    lost, *kept = job.window.next_batch(BATCH, STEPS_AN_EPOCH)["uid"]
    (instead,) = job.window.next_batch(1, STEPS_AN_EPOCH)["uid"]
    job.window.trained({uid: [20, 24] for uid in (*kept, instead)}, epoch=0)
    # Nobody can see it; it would grow for as long as the job trains.
    assert job.window._name_of == {} and len(job.window._rounds._prompts) == PROMPTS // BATCH * BATCH - BATCH - 1


@pytest.mark.parametrize("stop", [1, 2, STEPS_AN_EPOCH, STEPS_AN_EPOCH + 3])
def test_a_resumed_job_hands_out_what_was_left_and_nothing_twice(tmp_path, stop):
    whole = Job()
    for _ in range(stop):
        whole.run()
    whole.window.save(tmp_path)
    rest = [whole.run() for _ in range(STEPS_AN_EPOCH)]
    again = Job()
    again.step = stop + 1
    again.window.load(tmp_path)
    left_in_window = (STEPS_AN_EPOCH - stop % STEPS_AN_EPOCH) % STEPS_AN_EPOCH
    assert [again.run() for _ in range(left_in_window)] == rest[:left_in_window]
    again.run()


def test_a_checkpoint_without_tail_rounds_is_none(tmp_path):
    Job().window.load(tmp_path)
