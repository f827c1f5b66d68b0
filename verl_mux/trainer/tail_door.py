"""`mux.rollout.tail: defer` in a trainer: a window of prompts is drawn ahead and handed out in the order of its tail rounds.

draw ahead -> (next_batch -> trained)* -> draw ahead ... ; a checkpoint notes where in the data the window began, and which of
its prompts are left: a resumed job draws the window again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_mux.rollout.control.launch_order import prompts_of
from verl_mux.rollout.control.length_estimates import LengthEstimates
from verl_mux.rollout.control.tail_rounds import DeferPolicy, TailRounds
from verl_mux.rollout.lengths.predictor import LengthPredictor
from verl_mux.rollout.lengths.rows import Prompt

_FILE = "mux_tail.pt"
_STEP = "global_steps"  # verl's note of the step for which a batch was drawn


class TailDoor:
    """Names of prompt groups are the numbers of their draws.

    draw: verl's own, so many prompts as the data loader hands them out. loader: the trainer's data loader, for its state.
    steps_ahead: steps left in this epoch and in the training, so that no more is drawn than will be trained.
    """

    def __init__(
        self, policy: DeferPolicy, batch: int, samples: int, predictor: LengthPredictor, *, draw: Callable[[int], TensorDict],
        loader: Callable[[], Any], steps_ahead: Callable[[], int],
    ) -> None:  # fmt: skip
        self._estimates = LengthEstimates(predictor, samples)
        self._rounds = TailRounds(policy, batch, self._estimates)
        self._policy, self._batch = policy, batch
        self._draw, self._loader, self._steps_ahead = draw, loader, steps_ahead
        self._rows: TensorDict | None = None
        self._row_of: dict[str, int] = {}  # of those not handed out
        self._name_of: dict[str, str] = {}  # by uid, of those handed out for this step
        self._first, self._next, self._began = 0, 0, None  # numbers of the window's first draw and of the next; the loader then

    def next_batch(self, count: int) -> TensorDict:
        """The prompts of the next round; `count` of them whatever a round holds."""
        names = self._rounds.take(count)
        if len(names) < count:
            self._draw_ahead(count - len(names), keep=names)
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
        """For the logger: mean length of the step's responses over that of its window, measured and as it was expected; steps of
        the window beyond `max_mean` so far; prompt groups left in it."""
        mix = self._rounds.mix
        return {
            "tail/step_mean_length_ratio": mix.measured, "tail/step_expected_length_ratio": mix.expected,
            "tail/steps_above_max_mean": float(mix.above), "tail/window_left": float(self._rounds.left),
        }  # fmt: skip

    def save(self, folder: Path) -> None:
        """Into a checkpoint's folder."""
        saved = {
            "rounds": self._rounds.to_dict(), "estimates": self._estimates.to_dict(), "loader": self._began,
            "first": self._first, "next": self._next,
        }  # fmt: skip
        torch.save(saved, folder / _FILE)

    def load(self, folder: Path) -> None:
        """Go on where a checkpoint stood; before anything is drawn. Nothing where it was written without tail rounds."""
        if not (folder / _FILE).exists():
            return
        saved = torch.load(folder / _FILE, weights_only=False)
        self._estimates.restore(saved["estimates"])
        if saved["loader"] is None:
            return
        self._loader().load_state_dict(saved["loader"])
        self._first, self._next, self._began = saved["first"], saved["first"], saved["loader"]
        names, prompts = self._add_rows(saved["next"] - saved["first"], keep=())
        left = {name for its in saved["rounds"]["rounds"] for name in its}
        self._rounds.restore(saved["rounds"], {n: p for n, p in zip(names, prompts, strict=True) if n in left})
        self._row_of = {name: at for name, at in self._row_of.items() if name in left}

    # ----------------------------------------------------------------

    def _draw_ahead(self, missing: int, keep: Sequence[str]) -> None:
        """The next window. keep: those of the last one that are about to be handed out."""
        steps = self._steps_ahead() if self._policy.window is None else min(self._policy.window, self._steps_ahead())
        self._began, self._first = self._loader().state_dict(), self._next
        count = max(missing, steps * self._batch - len(keep))
        self._rounds.gather(*self._add_rows(count, keep))

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
