"""In which order new prompt groups are launched: as they come, or by response lengths predicted online.

`fifo` as they came, `sjf` shortest first, `ljf` longest first. Before a barrier the step ends with the longest response, so it
must start first; where early finishers are used at once, or the last ones are cut off, the shortest go first. With known lengths
and 64 slots (`verl-mux bench predictor`'s simulation, 1024 requests, 20 draws), as a share of FIFO:

| lengths                                  | sjf mean completion | sjf makespan | ljf mean completion | ljf makespan |
| Azure LLM inference 2023, conversation   | 0.64                | 1.06         | 1.44                | 0.89         |
| ServeGen, DeepSeek-R1, all clients       | 0.57                | 1.03         | 1.81                | 0.68         |
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from verl_mux.rollout.lengths.group_early import GroupEarly
from verl_mux.rollout.lengths.predictor import LengthPredictor
from verl_mux.rollout.lengths.rows import LengthRow, Prompt

ORDERS = ("fifo", "sjf", "ljf")
BY_TRAINER_MODE = {
    "sync": "ljf",
    "mux_separate": "ljf",
    "mux_colocate": "ljf",
    "colocate_async": "sjf",
    "separate_async": "sjf",
}


def default_order(trainer_mode: str, *, aborts_tail: bool) -> str:
    """Order for a trainer mode. aborts_tail: over-sampling or segments cut the longest responses off."""
    return "sjf" if aborts_tail else BY_TRAINER_MODE.get(trainer_mode, "fifo")


def turns(order: str, scores: np.ndarray) -> np.ndarray:
    """When each prompt's turn comes, 0 first: (prompts,) int64. scores: predicted, higher is longer. Ties keep their order.

    Raises:
        ValueError: the order is none of ORDERS.
    """
    if order not in ORDERS:
        raise ValueError(f"unknown order {order!r}; allowed: {', '.join(ORDERS)}")
    keys = scores if order == "sjf" else -scores if order == "ljf" else np.zeros(len(scores))
    turn = np.empty(len(scores), dtype=np.int64)
    turn[np.argsort(keys, kind="stable")] = np.arange(len(scores))
    return turn


class LaunchOrder:
    """place(prompts) -> who goes first; observe(lengths) whenever responses are trained. Fits in a thread, one at a time.

    order: fifo | sjf | ljf. While a fit runs, prompts keep their order.
    """

    def __init__(self, order: str, predictor: LengthPredictor) -> None:
        self.order, self._predictor = order, predictor
        self._lock = threading.Lock()
        self._prompts: dict[str, Prompt] = {}
        self._fit: threading.Thread | None = None
        self._unread: list[LengthRow] = []
        self._early: set[str] = set()  # prompt groups whose lengths were read while they ran

    def place(self, uids: Sequence[str], prompts: Sequence[Prompt]) -> np.ndarray:
        """Indices of the prompts, the first to launch first: (prompts,) int64."""
        if self.order == "fifo":  # nothing is predicted, so nothing need be learnt
            return np.arange(len(prompts))
        self._prompts |= dict(zip(uids, prompts, strict=True))
        if len(prompts) < 2 or not self._lock.acquire(blocking=False):
            return np.arange(len(prompts))
        try:
            scores = self._predictor.predict(prompts)
        finally:
            self._lock.release()
        return np.argsort(turns(self.order, scores), kind="stable")

    def observe(self, lengths: Mapping[str, Sequence[int]], epoch: int) -> None:
        """Response lengths in tokens by the uid of their prompt group; the uids are forgotten."""
        self._unread += [
            LengthRow(self._prompts[uid], epoch, int(length))
            for uid, its in lengths.items()
            if uid in self._prompts and uid not in self._early
            for length in its
        ]
        self.forget(lengths)
        if self._unread and (self._fit is None or not self._fit.is_alive()):
            rows, self._unread = self._unread, []
            self._fit = threading.Thread(target=self._learn, args=(rows,), daemon=True)
            self._fit.start()

    def forget(self, uids: Iterable[str]) -> None:
        """Prompt groups that will not be trained, or have been."""
        for uid in uids:
            self._prompts.pop(uid, None)
            self._early.discard(uid)

    def observe_early(self, uid: str, length: int, epoch: int) -> None:
        """A response of a prompt group that is still under way has ended: for predictors that read the group's own lengths."""
        if uid in self._prompts and isinstance(self._predictor, GroupEarly) and self._lock.acquire(blocking=False):
            try:
                self._predictor.observe([LengthRow(self._prompts[uid], epoch, length)])
            finally:
                self._lock.release()
            self._early.add(uid)

    def _learn(self, rows: list[LengthRow]) -> None:
        with self._lock:
            self._predictor.observe(rows)
            # The fit itself happens in predict.
            self._predictor.predict([rows[0].prompt])


def prompts_of(batch: Any) -> list[Prompt]:
    """The prompts of verl's batch: a prompt's id is the data set's index where there is one, else its text."""
    count = len(batch["uid"])
    raw, index = (list(batch[key]) if key in batch else [None] * count for key in ("raw_prompt", "index"))
    return [_prompt(messages or [], at) for messages, at in zip(raw, index, strict=True)]


def _prompt(messages: Sequence[Any], index: Any) -> Prompt:
    text = "\n".join(str(message.get("content", "")) for message in messages if isinstance(message, dict))
    return Prompt(str(index) if index is not None else text, text)
