"""The prompts of a step: drawn by verl, gathered into tail rounds where `mux.rollout.tail=defer`, and put into launching order.

Runs in the trainer's driver; called by trainer/modes.py and trainer/step_rollout.py. Touches verl's data loader and the replay
buffer's note of the order; saves its window beside verl's checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu

from verl_mux.config.schema import RolloutConfig
from verl_mux.profiling.eventlog import events
from verl_mux.rollout.control.launch_order import LaunchOrder, prompts_of
from verl_mux.rollout.control.tail_rounds import LengthEstimates, TailRounds
from verl_mux.rollout.lengths.predictors import LengthPredictor, Prompt, make_predictor

_FILE = "mux_tail.pt"
TOO_MANY_FILTERED = (
    "this step has drawn algorithm.filter_groups.max_num_gen_batches batches of prompts, and too few prompt groups have rewards"
    " that differ: raise that number, 0 for no limit, or choose prompts that the model solves sometimes"
)
# How often as many prompt groups as a step has fail, and none succeeds, before the job ends: others would be drawn without end.
FAILED_STEPS = 3
ALL_FAIL = "{} prompt groups failed one after the other and none succeeded: `verl-mux report` says what their agent loops raised"
_STEP = "global_steps"  # verl's note of the step for which a batch was drawn


class Prompts:
    """next_batch -> trained, every step. Reads verl's counters and data loader, which exist by then."""

    def __init__(self, trainer: PPOTrainer, keys: RolloutConfig) -> None:
        self._trainer = trainer
        self.order = LaunchOrder(keys.launch_order, make_predictor(keys.dispatch.predictor))
        self.window: PromptWindow | None = None
        self._drawn = 0, 0  # step, and its prompts so far
        filters, batch = trainer.config.algorithm.get("filter_groups") or {}, trainer.config.data.train_batch_size
        batches = (filters.get("max_num_gen_batches") or 0) if filters.get("enable") else 0
        self._most = batches * batch if batches > 0 else None
        if keys.defers:
            data, samples = trainer.config.data, trainer.config.actor_rollout_ref.rollout.n
            predictor = make_predictor(keys.dispatch.predictor)
            self.window = PromptWindow(data.train_batch_size, samples, predictor, self._draw, trainer.train_dataloader)

    def room(self, count: int) -> int:
        """How many of `count` prompts may still be drawn for this step."""
        return count if self._most is None else max(0, min(count, self._most - self._drawn_before()))

    def _drawn_before(self) -> int:
        step, drawn = self._drawn
        return drawn if step == self._trainer.global_steps else 0

    def next_batch(self, count: int | None) -> TensorDict:
        """Prompts for this step, in launching order; `count` None: as many as it trains."""
        step, count = self._trainer.global_steps, self._trainer.config.data.train_batch_size if count is None else count
        if before := self._drawn_before():
            self._trainer.phases.log.log(events.DRAWN_AGAIN, extra={"prompts": count, "drawn": before}, step=step)
        self._drawn = step, before + count
        if self.window is None:
            batch = self._draw(count)
        else:
            batch = stamped(self.window.next_batch(count, self._steps_ahead()), self._trainer.global_steps)
        uids = list(batch["uid"])
        self.remember_order(uids)
        place = self.order.place(uids, prompts_of(batch))
        return batch if (place == np.arange(len(place))).all() else batch[place.tolist()]

    def remember_order(self, uids: list[str]) -> None:
        """Gradients keep the order in which prompts were drawn, whatever the launching order."""
        if hasattr(self._trainer.replay_buffer, "submitted"):  # a user's own sampler has no such method
            self._trainer.replay_buffer.submitted(uids)

    def trained(self, batch: KVBatchMeta) -> None:
        """Response lengths of a batch that is about to be trained on are learnt."""
        lengths: dict[str, list[int]] = defaultdict(list)
        for key, tag in zip(batch.keys, batch.tags, strict=True):
            if not tag.get("is_padding", False):
                lengths[key.split("_")[0]].append(int(tag["response_len"]))
        self.order.observe(lengths, self._epoch())
        if self.window is not None:
            self.window.trained(lengths, self._epoch())

    def _draw(self, count: int) -> TensorDict:
        return PPOTrainer._next_train_batch(self._trainer, count)

    def _epoch(self) -> int:
        return (self._trainer.global_steps - 1) // max(1, self._trainer.steps_per_epoch)

    def _steps_ahead(self) -> int:
        """Steps left in this epoch and in the training, this one included."""
        step, an_epoch = max(self._trainer.global_steps, 1), max(1, self._trainer.steps_per_epoch)
        return max(1, min(an_epoch - (step - 1) % an_epoch, self._trainer.total_training_steps - step + 1))


class PromptWindow:
    """The rest of an epoch's prompts, drawn ahead and handed out in the order of their tail rounds.

    draw ahead -> (next_batch -> trained)* -> draw ahead ... ; a checkpoint notes where in the data the window began, and which of
    its prompts are left: a resumed job draws the window again. Names of prompt groups are the numbers of their draws.

    batch: prompt groups of a step. samples: responses of a group. draw: verl's, the next prompts of the data loader.
    """

    def __init__(
        self, batch: int, samples: int, predictor: LengthPredictor, draw: Callable[[int], TensorDict], loader: Any
    ) -> None:
        self._estimates = LengthEstimates(predictor, samples)
        self._rounds = TailRounds(batch, self._estimates)
        self._batch, self._draw, self._loader = batch, draw, loader
        self._rows: TensorDict | None = None
        self._row_of: dict[str, int] = {}  # of those not handed out
        self._name_of: dict[str, str] = {}  # by uid, of those handed out for this step
        self._first, self._next, self._began = 0, 0, None  # numbers of the window's first draw and of the next; the loader then

    def next_batch(self, count: int, steps_ahead: int) -> TensorDict:
        """The prompts of the next round; `count` of them whatever a round holds. steps_ahead: left in this epoch and in the
        training, so that no more is drawn than will be trained."""
        names = self._rounds.take(count)
        if len(names) < count:
            # The next window; of the last one those stay that are about to be handed out.
            self._began, self._first = self._loader.state_dict(), self._next
            self._rounds.gather(*self._add_rows(max(count, steps_ahead * self._batch) - len(names), keep=names))
            names += self._rounds.take(count - len(names))
        assert self._rows is not None
        batch = self._rows[[self._row_of.pop(name) for name in names]]
        self._name_of |= dict(zip(batch["uid"], names, strict=True))
        return batch

    def trained(self, lengths: dict[str, list[int]], epoch: int) -> None:
        """Response lengths of a step's prompt groups, by uid. What else was handed out for it was given up."""
        self._rounds.trained({name: lengths.get(uid, []) for uid, name in self._name_of.items()}, epoch)
        self._name_of = {}

    def figures(self) -> dict[str, float]:
        """Mean length of the step's responses over that of its window, measured and as it was expected; steps of the window
        beyond the bound so far; prompt groups left in it."""
        mix = self._rounds.mix
        return {
            "tail/step_mean_length_ratio": mix.measured, "tail/step_expected_length_ratio": mix.expected,
            "tail/steps_above_max_mean": float(mix.above), "tail/window_left": float(self._rounds.left),
        }  # fmt: skip

    def save(self, folder: Path) -> None:
        """Into a checkpoint's folder."""
        saved = {"rounds": self._rounds.to_dict(), "estimates": self._estimates.to_dict()}
        torch.save({**saved, "loader": self._began, "first": self._first, "next": self._next}, folder / _FILE)

    def load(self, folder: Path) -> None:
        """Go on where a checkpoint stood, before anything is drawn; nothing where it was written without tail rounds."""
        if not (folder / _FILE).exists():
            return
        saved = torch.load(folder / _FILE, weights_only=False)
        self._estimates.restore(saved["estimates"])
        if saved["loader"] is None:
            return
        self._loader.load_state_dict(saved["loader"])
        self._first, self._next, self._began = saved["first"], saved["first"], saved["loader"]
        names, prompts = self._add_rows(saved["next"] - saved["first"], keep=())
        left = {name for names in saved["rounds"]["rounds"] for name in names}
        self._rounds.restore(saved["rounds"], {n: p for n, p in zip(names, prompts, strict=True) if n in left})
        self._row_of = {name: at for name, at in self._row_of.items() if name in left}

    def _add_rows(self, count: int, keep: Sequence[str]) -> tuple[list[str], list[Prompt]]:
        rows = self._draw(count)
        rows.pop(_STEP, None)
        names = [str(self._next + at) for at in range(count)]
        prompts = prompts_of(rows)
        if keep:
            assert self._rows is not None
            rows = tu.concat_tensordict([self._rows[[self._row_of[name] for name in keep]], rows])
        self._rows, self._next = rows, self._next + count
        self._row_of = {name: at for at, name in enumerate([*keep, *names])}
        return names, prompts


def stamped(batch: TensorDict, step: int) -> TensorDict:
    """A batch for this step, as verl marks one that it draws."""
    tu.assign_non_tensor_data(batch, _STEP, step)
    return batch
