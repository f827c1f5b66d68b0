"""The order in which new prompt groups are launched, from lengths predicted online."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from verl_mux.rollout.dispatch_order import ranks
from verl_mux.rollout.length_rows import LengthRow, Prompt
from verl_mux.rollout.predictor import LengthPredictor


class LaunchOrder:
    """place(prompts) -> who goes first; observe(lengths) whenever responses are trained. Fits in a thread, one at a time.

    order: fifo | sjf | ljf. While a fit runs, places come from the scores of the last one.
    """

    def __init__(self, order: str, predictor: LengthPredictor) -> None:
        self.order, self._predictor = order, predictor
        self._lock = threading.Lock()
        self._prompts: dict[str, Prompt] = {}
        self._fit: threading.Thread | None = None
        self._unread: list[LengthRow] = []

    def place(self, uids: Sequence[str], prompts: Sequence[Prompt]) -> np.ndarray:
        """Indices of the prompts, the first to launch first: (prompts,) int64."""
        self._prompts |= dict(zip(uids, prompts, strict=True))
        if self.order == "fifo" or len(prompts) < 2 or not self._lock.acquire(blocking=False):
            return np.arange(len(prompts))
        try:
            scores = self._predictor.predict(prompts)
        finally:
            self._lock.release()
        return np.argsort(ranks(self.order, scores, np.zeros(len(prompts))), kind="stable")

    def observe(self, lengths: dict[str, Sequence[int]], epoch: int) -> None:
        """Response lengths in tokens by the uid of their prompt group; the uids are forgotten."""
        self._unread += [
            LengthRow(self._prompts[uid], epoch, int(length))
            for uid, its in lengths.items()
            if uid in self._prompts
            for length in its
        ]
        for uid in lengths:
            self._prompts.pop(uid, None)
        if self.order != "fifo" and self._unread and (self._fit is None or not self._fit.is_alive()):
            rows, self._unread = self._unread, []
            self._fit = threading.Thread(target=self._learn, args=(rows,), daemon=True)
            self._fit.start()

    def settle(self) -> None:
        """Wait for the fit that runs, if one does."""
        if self._fit is not None:
            self._fit.join()

    def _learn(self, rows: list[LengthRow]) -> None:
        with self._lock:
            self._predictor.observe(rows)
            # The fit itself happens in predict.
            self._predictor.predict([rows[0].prompt])


def prompt_of(row: dict[str, Any]) -> Prompt:
    """A prompt of verl's batch: its id is the data set's index where there is one."""
    messages = row.get("raw_prompt") or []
    text = "\n".join(str(message.get("content", "")) for message in messages if isinstance(message, dict))
    index = row.get("index")
    return Prompt(str(index) if index is not None else text, text)
