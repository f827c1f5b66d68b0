"""A small learned model of response lengths: a prompt's own history, drawn to what a ridge regression reads in its text.

Runs in the trainer; called by rollout/control. Pure. On the log of lengths: length = epoch + text + prompt + noise. The score
of a prompt is text + k (own mean - text), with k = n signal / (n signal + noise) after n epochs. Text that orders prompts no
better than chance, left out one by one, is ignored.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import numpy as np

from verl_mux.rollout.lengths.predictors import LengthRow, Prompt

_BUCKETS = 1 << 16  # of hashed words and word pairs
_COLUMNS = 1024  # of a fit: the commonest of them that three prompts or more have
_MAX_CHARS, _MAX_WORDS = 4096, 400
_MAX_PROMPTS = 3000  # of a fit: the most recent ones
_MIN_PROMPTS = 64  # below it text is not looked at
_REFIT_SHARE = 0.1
_PENALTIES = np.geomspace(0.1, 1000.0, 9)
_MIN_Z = 4.0  # standard errors by which the text must correlate with lengths
_PRIOR_NOISE, _PRIOR_FREEDOM = 0.4, 20  # share of the variance that is noise, before prompts come again
# Chinese, Japanese and Korean have no spaces between words: each sign counts as a word of its own.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W\d_{_UNSPACED}]+|\d+(?:[.,]\d+)*|[^\w\s]")


def describe(text: str) -> tuple[np.ndarray, np.ndarray]:
    """Buckets of its words and word pairs, sorted, (words,); logs of its characters, words and largest number, (3,)."""
    shown = text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS // 2]} {text[-_MAX_CHARS // 2 :]}"
    words = _WORD.findall(shown.lower())
    words = words if len(words) <= _MAX_WORDS else words[: _MAX_WORDS // 2] + words[-_MAX_WORDS // 2 :]
    codes = [zlib.crc32(word.encode("utf-8", "replace")) for word in words]  # the same in every process
    pairs = [first * 0x9E3779B1 ^ second for first, second in zip(codes, codes[1:], strict=False)]
    numbers = [
        float(word.replace(",", "")[:15]) for word in words if word.isascii() and word[0].isdigit() and word.count(".") < 2
    ]
    buckets = np.unique(np.array(codes + pairs, dtype=np.uint64) % _BUCKETS).astype(np.int32)
    return buckets, np.log1p([len(text), len(words), max(numbers, default=0.0)])


class Learned:
    """observe -> (a fit, when a tenth of the rows is new) -> predict. Before the first row every score is 0: FIFO."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[int, np.ndarray]] = {}  # prompt -> epoch -> samples, sums of logs, of squared logs, of lengths
        self._epochs: dict[int, np.ndarray] = {}  # epoch -> samples, sum of logs
        self._features: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._same_text: dict[int, str] = {}
        self._rows = self._rows_at_fit = 0
        self._scores: dict[str, float] = {}
        self._columns = np.zeros(0, dtype=np.int32)  # the buckets that are columns, sorted
        self._text = np.zeros(3), np.zeros(3), 0.0  # centre, coefficients, intercept

    def observe(self, rows: Sequence[LengthRow]) -> None:
        """Learn from finished responses."""
        for row in rows:
            name, log = row.prompt.id, float(np.log1p(row.length))
            cell = self._sums.pop(name, {})
            cell[row.epoch] = cell.get(row.epoch, np.zeros(4)) + (1, log, log * log, row.length)
            self._sums[name] = cell  # the most recent last
            self._epochs[row.epoch] = self._epochs.get(row.epoch, np.zeros(2)) + (1, log)
            if name not in self._features:
                self._features[name] = describe(row.prompt.text)
                self._same_text[hash(row.prompt.text)] = name
        self._rows += len(rows)

    def predict(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """Log lengths, (prompts,); zeros before the first row."""
        if not self._rows:
            return np.zeros(len(prompts))
        if self._rows - self._rows_at_fit > _REFIT_SHARE * self._rows_at_fit:
            self._fit()
        return np.array([self._score(prompt) for prompt in prompts], dtype=np.float64)

    def _score(self, prompt: Prompt) -> float:
        for name in (prompt.id, self._same_text.get(hash(prompt.text)) if prompt.text else None):
            if name in self._scores:
                return self._scores[name]
        centre, coefficients, intercept = self._text
        return float((self._row(describe(prompt.text)) - centre) @ coefficients + intercept)

    def _row(self, features: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """(columns + 3,): words that occur, of unit length; the numbers."""
        buckets, numbers = features
        row = np.zeros(len(self._columns) + 3)
        at = np.searchsorted(self._columns, buckets)
        known = at[self._columns[np.minimum(at, len(self._columns) - 1)] == buckets] if len(self._columns) else at[:0]
        row[known] = 1 / max(len(known), 1) ** 0.5
        row[-3:] = numbers
        return row

    def _fit(self) -> None:
        self._rows_at_fit = self._rows
        names = list(self._sums)[-_MAX_PROMPTS:]
        level = {epoch: total / count for epoch, (count, total) in self._epochs.items()}
        cells = [[total / count - level[epoch] for epoch, (count, total, *_) in self._sums[name].items()] for name in names]
        counts = np.array([len(cell) for cell in cells], dtype=np.float64)
        means = np.array([np.mean(cell) for cell in cells])
        text, centre, coefficients = self._fit_text(names, means, counts / (counts + 1))
        signal, noise = self._variances(names, cells, means, text)
        k = counts * signal / (counts * signal + noise)
        now, middle = level[max(level)], float(np.average(means, weights=counts))
        if coefficients.any() and self._would_have_helped(names, text, signal, noise):
            scores, stranger = text + k * (means - text), middle
        else:  # the running mean of lengths, which a few very long responses decide; a stranger gets the mean of all
            totals = np.array([np.sum(list(self._sums[name].values()), axis=0) for name in names])
            plain = np.log1p(totals[:, 3] / totals[:, 0])
            shift = middle - float(np.average(plain, weights=counts))
            scores = plain + shift
            stranger = shift + float(np.log1p(totals[:, 3].sum() / totals[:, 0].sum())) if not coefficients.any() else middle
        self._scores = dict(zip(names, (now + scores).tolist(), strict=True))
        self._text = centre, coefficients, now + stranger

    def _would_have_helped(self, names: list[str], text: np.ndarray, signal: float, noise: float) -> bool:
        """Whether text and history together would have ordered the newest epoch at least as well as the running mean."""
        newest, blended, plain, true = max(self._epochs), [], [], []
        for name, said in zip(names, text, strict=True):
            past = [row for epoch, row in self._sums[name].items() if epoch != newest]
            if past and newest in self._sums[name]:
                total = np.sum(past, axis=0)
                plain.append(float(total[3] / total[0]))
                own = float(np.mean([row[1] / row[0] for row in past]))
                blended.append((said, own, len(past) * signal / (len(past) * signal + noise)))
                true.append(self._sums[name][newest][1] / self._sums[name][newest][0])
        if len(true) < _MIN_PROMPTS:
            return True
        said, owns, k = np.array(blended).T
        owns += said.mean() - owns.mean()
        order = np.argsort(np.argsort([said + k * (owns - said), plain, true], axis=1), axis=1)
        return bool(np.corrcoef(order[0], order[2])[0, 1] >= np.corrcoef(order[1], order[2])[0, 1])

    def _fit_text(self, names: list[str], target: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What each prompt's text says of it when it is left out, (prompts,); centre and coefficients for others, (columns,)."""
        found, count = np.unique(np.concatenate([self._features[name][0] for name in names]), return_counts=True)
        common = np.flatnonzero((count >= 3) & (count <= 0.95 * len(names)))
        self._columns = np.sort(found[common[np.argsort(-count[common], kind="stable")[:_COLUMNS]]])
        design = np.stack([self._row(self._features[name]) for name in names])
        centre, mean = design.mean(0), float(np.average(target, weights=weight))
        nothing = np.full(len(names), mean), centre, np.zeros(design.shape[1])
        if len(names) < _MIN_PROMPTS:
            return nothing
        scale = np.ones(design.shape[1])
        scale[-3:] = 0.1 / np.maximum(design[:, -3:].std(0), 1e-3)
        root = np.sqrt(weight / weight.max())
        rows = (design - centre) * scale * root[:, None]
        aim = (target - mean) * root
        values, left = _directions(rows)
        rotated, least, penalty, residual = left.T @ aim, np.inf, 1.0, aim
        for tried in _PENALTIES:  # the one with the least leave-one-out error
            shrink = values / (values + tried)
            without = (aim - left @ (shrink * rotated)) / (1 - np.minimum((left**2) @ shrink, 0.999))
            if (error := float(without @ without)) < least:
                least, penalty, residual = error, float(tried), without
        left_out = (aim - residual) / root
        spread = left_out.std() * target.std()
        correlation = float(np.mean((left_out - left_out.mean()) * (target - target.mean())) / spread) if spread > 0 else 0.0
        if correlation * np.sqrt(len(names)) < _MIN_Z or correlation < 0.1:
            return nothing
        coefficients = scale * (rows.T @ (left @ (rotated / (values + penalty))))
        return mean + left_out, centre, coefficients

    def _variances(self, names: list[str], cells: list[list[float]], means: np.ndarray, text: np.ndarray) -> tuple[float, float]:
        """(between prompts, of one prompt's epoch) of what text does not say."""
        residual = np.array([value - at for cell, at in zip(cells, text, strict=True) for value in cell])
        total = float(np.mean(residual**2)) + 1e-9
        noise, freedom = _PRIOR_NOISE * total, _PRIOR_FREEDOM
        samples = np.array([row for name in names for row in self._sums[name].values()])
        within = float((samples[:, 2] - samples[:, 1] ** 2 / samples[:, 0]).sum())
        if (seen := float((samples[:, 0] - 1).sum())) >= freedom:
            noise = within / seen / float(samples[:, 0].mean())
        again = [(value - mean) ** 2 for cell, mean in zip(cells, means, strict=True) if len(cell) > 1 for value in cell]
        repeated = sum(len(cell) - 1 for cell in cells if len(cell) > 1)
        noise = min((sum(again) + freedom * noise) / (repeated + freedom), total)
        return max(total - noise, 0.02 * total), noise


def _directions(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Squared singular values (rank,) and left singular vectors (rows, rank), from the smaller Gram matrix."""
    if len(rows) <= rows.shape[1]:
        values, left = np.linalg.eigh(rows @ rows.T)
        keep = values > 1e-8 * values[-1]
        return values[keep], left[:, keep]
    values, right = np.linalg.eigh(rows.T @ rows)
    keep = values > 1e-8 * values[-1]
    return values[keep], rows @ right[:, keep] / np.sqrt(values[keep])
