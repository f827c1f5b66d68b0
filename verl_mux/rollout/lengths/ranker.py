"""A LightGBM classifier of short, medium and long responses, trained online. Needs the `predictor` extra.

Three classes say less than an order does, so the score is the expected class and not the likeliest.
Where the two were compared it ordered no better than the default predictor, which therefore does without the extra.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl_mux.rollout.lengths.past_lengths import LengthHistory
from verl_mux.rollout.lengths.prompt_features import describe
from verl_mux.rollout.lengths.rows import LengthRow, Prompt

_WORD_COLUMNS = 128
_MIN_ROWS = 60
_MAX_ROWS = 20_000
_REFIT_SHARE = 0.1
_ROUNDS = 60
_PARAMETERS = {
    "objective": "multiclass",
    "num_class": 3,
    "learning_rate": 0.08,
    "num_leaves": 15,
    "feature_fraction": 0.5,
    "num_threads": 1,
    "seed": 0,
    "deterministic": True,
    "verbose": -1,
}


class Ranker:
    """observe -> (training, when a tenth of the rows is new) -> predict. Before _MIN_ROWS rows every score is 0."""

    def __init__(self) -> None:
        import lightgbm  # the extra is missed at start and not in the first step

        self._lightgbm = lightgbm
        self._history = LengthHistory()
        self._design: list[np.ndarray] = []
        self._lengths: list[int] = []
        self._model = None
        self._rows_at_fit = 0

    def observe(self, rows: Sequence[LengthRow]) -> None:
        """Learn from finished responses: each row's features are those its prompt had before this call."""
        self._design.extend(self._columns([row.prompt for row in rows]))
        self._lengths.extend(row.length for row in rows)
        del self._design[:-_MAX_ROWS], self._lengths[:-_MAX_ROWS]
        self._history.add(rows)

    def predict(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """Expected class from 0 (short) to 2 (long), (prompts,)."""
        new = self._history.num_rows - self._rows_at_fit
        if len(self._lengths) >= _MIN_ROWS and new > _REFIT_SHARE * len(self._lengths):
            self._fit()
        if self._model is None or not prompts:
            return np.zeros(len(prompts))
        return self._model.predict(np.stack(self._columns(prompts))) @ np.arange(3)

    def _fit(self) -> None:
        lengths = np.array(self._lengths)
        classes = np.searchsorted(np.quantile(lengths, [1 / 3, 2 / 3]), lengths)
        self._model = self._lightgbm.train(_PARAMETERS, self._lightgbm.Dataset(np.stack(self._design), classes), _ROUNDS)
        self._rows_at_fit = self._history.num_rows

    def _columns(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """One row of features a prompt: numbers, folded words, and its own history, NaN where there is none."""
        history = self._own_history(prompts)
        return [np.concatenate([*self._text_columns(p.text), own]) for p, own in zip(prompts, history, strict=True)]

    @staticmethod
    def _text_columns(text: str) -> tuple[np.ndarray, np.ndarray]:
        features = describe(text)
        return features.numbers, np.bincount(features.words % _WORD_COLUMNS, minlength=_WORD_COLUMNS)

    def _own_history(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """(prompts, 3): mean log length, that of its latest epoch, number of epochs."""
        rows = self._history.find(prompts)
        out = np.full((len(prompts), 3), np.nan)
        known = rows >= 0
        if known.any():
            cells = self._history.log_mean[rows[known]]
            present = ~np.isnan(cells)
            last = present.shape[1] - 1 - np.argmax(present[:, ::-1], axis=1)
            out[known, 0] = np.nanmean(cells, axis=1)
            out[known, 1] = cells[np.arange(len(cells)), last]
            out[known, 2] = present.sum(axis=1)
        return out
