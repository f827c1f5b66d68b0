"""The default length predictor: per-prompt history, and text where the history shows that text tells something."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl_mux.rollout.lengths.blend import Blend, fit
from verl_mux.rollout.lengths.past_lengths import LengthHistory
from verl_mux.rollout.lengths.prompt_features import PromptFeatures, describe
from verl_mux.rollout.lengths.rows import LengthRow, Prompt

_MAX_FITTED_PROMPTS = 6000
_REFIT_SHARE = 0.1


class DefaultPredictor:
    """observe -> (a fit, when a tenth of the rows is new) -> predict. Before the first row every score is 0: FIFO.

    Scores are log lengths where the blend is trusted and running means otherwise: an order, not a number of tokens.
    """

    def __init__(self) -> None:
        self._history = LengthHistory()
        self._features: dict[int, PromptFeatures] = {}
        self._blend: Blend | None = None
        self._rows_at_fit = 0

    def observe(self, rows: Sequence[LengthRow]) -> None:
        """Learn from finished responses."""
        self._history.add(rows)
        where = self._history.find([row.prompt for row in rows])
        for at, row in zip(where.tolist(), rows, strict=True):
            if at not in self._features:
                self._features[at] = describe(row.prompt.text)

    def predict(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """(prompts,) float64; higher means longer. Refits first where enough is new (seconds for thousands of prompts)."""
        if not prompts or not len(self._history):
            return np.zeros(len(prompts))
        blend = self._fitted()
        rows = self._history.find(prompts)
        text = self._text(blend, prompts, rows)
        if blend.trusted:
            return self._blended(blend, rows, text)
        return self._running_mean(blend, rows, text)

    def _fitted(self) -> Blend:
        new = self._history.num_rows - self._rows_at_fit
        if self._blend is None or new > _REFIT_SHARE * min(self._history.num_rows, _MAX_FITTED_PROMPTS):
            rows = self._history.most_recent(_MAX_FITTED_PROMPTS)
            self._features = {at: self._features[at] for at in rows.tolist() if at in self._features}
            rows = np.array(list(self._features))
            self._blend = fit(self._history, rows, [self._features[at] for at in rows.tolist()])
            self._rows_at_fit = self._history.num_rows
        return self._blend

    def _text(self, blend: Blend, prompts: Sequence[Prompt], rows: np.ndarray) -> np.ndarray:
        """What the text says of each prompt's log length: (prompts,)."""
        out = np.full(len(prompts), blend.centre)
        fitted = (rows >= 0) & (rows < len(blend.text_by_row))
        out[fitted] = blend.text_by_row[rows[fitted]]
        if blend.ridge is None:
            return np.where(np.isnan(out), blend.centre, out)
        unread = np.flatnonzero(~fitted | np.isnan(out))
        if len(unread):
            out[unread] = blend.ridge.predict([describe(prompts[at].text) for at in unread.tolist()])
        return out

    def _blended(self, blend: Blend, rows: np.ndarray, text: np.ndarray) -> np.ndarray:
        out, known = text.copy(), rows >= 0
        out[known] = blend.posterior(blend.adjusted(self._history, rows[known]), text[known])
        return out

    def _running_mean(self, blend: Blend, rows: np.ndarray, text: np.ndarray) -> np.ndarray:
        sums, counts = self._history.length_sum, self._history.count
        overall = sums.sum() / counts.sum()
        # A new prompt's expected length, from its log length and the spread around it.
        out = np.full(len(rows), overall) if blend.ridge is None else np.exp(text + (blend.signal + blend.noise) / 2)
        known = rows >= 0
        out[known] = sums[rows[known]].sum(axis=1) / counts[rows[known]].sum(axis=1)
        return out
