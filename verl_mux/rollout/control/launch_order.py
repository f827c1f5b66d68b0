"""In which order new prompt groups are launched: as they come (`fifo`), or by response lengths predicted online (`sjf`).

Runs in the trainer's driver; called by trainer/prompts.py, `turns` also by verl_mux/what_if and the benches. Pure but for the
thread in which a predictor is fitted. `ljf`, longest first, is measured by the benches and not offered: it would be right before
a barrier, but lengths as they can be predicted gain nothing there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from verl_mux.rollout.lengths.predictors import LengthPredictor, LengthRow, Prompt

ORDERS = ("fifo", "sjf")
_LONGEST_FIRST = "ljf"


def turns(order: str, scores: np.ndarray) -> np.ndarray:
    """When each prompt's turn comes, 0 first: (prompts,) int64. scores: predicted, higher is longer. Ties keep their order.

    Raises:
        ValueError: the order is neither of ORDERS nor ljf.
    """
    if order not in (*ORDERS, _LONGEST_FIRST):
        raise ValueError(f"unknown order {order!r}; allowed: {', '.join((*ORDERS, _LONGEST_FIRST))}")
    keys = scores if order == "sjf" else -scores if order == _LONGEST_FIRST else np.zeros(len(scores))
    turn = np.empty(len(scores), dtype=np.int64)
    turn[np.argsort(keys, kind="stable")] = np.arange(len(scores))
    return turn


class LaunchOrder:
    """place(prompts) -> which go first; observe(lengths) whenever responses are trained. Fits in a thread, one at a time.

    order: fifo | sjf. While a fit runs, prompts keep their order.
    """

    def __init__(self, order: str, predictor: LengthPredictor) -> None:
        self.order, self._predictor = order, predictor
        self._lock = threading.Lock()
        self._prompts: dict[str, Prompt] = {}
        self._fit: threading.Thread | None = None
        self._unread: list[LengthRow] = []

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
            for uid, of_group in lengths.items()
            if uid in self._prompts
            for length in of_group
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
