"""Synthetic prompts and lengths of different nature, for tests.

Each kind is a list of epochs of LengthRow. What decides a length: the prompt's words, its numbers, its length, its id and
nothing else, chance alone; with or without drift, missing prompts, samples, runaway responses.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from verl_mux.rollout.lengths.predictors import LengthRow, Prompt

_VOCABULARY = [
    a + b + c for a in ("ba", "ke", "lo", "mi", "nu", "ra", "se", "ti") for b in "nrstl" for c in ("a", "e", "or", "ix")
]
_KEYWORDS = {
    "prove": 1.2, "derive": 0.9, "explain": 0.6, "list": -0.4, "translate": -0.8,
    "summarize": -0.6, "name": -1.2, "story": 1.0, "code": 0.7, "define": -0.5,
}  # fmt: skip
Epochs = list[list[LengthRow]]


def generate(kind: str, seed: int, prompts: int = 400, epochs: int = 4) -> Epochs:
    """Epochs of one kind, the same for the same seed."""
    return (KINDS | TAILS)[kind](np.random.default_rng(seed), prompts, epochs)


def _words(rng, count: int) -> list[str]:
    share = 1 / np.arange(1, len(_VOCABULARY) + 1)
    return rng.choice(_VOCABULARY, count, p=share / share.sum()).tolist()


def _plain_text(rng, prompts: int) -> list[str]:
    return [" ".join(_words(rng, rng.integers(5, 60))) for _ in range(prompts)]


def _keyword_text(rng, prompts: int) -> tuple[list[str], np.ndarray]:
    texts, effects = [], []
    for _ in range(prompts):
        chosen = rng.choice(list(_KEYWORDS), rng.integers(1, 4), replace=False).tolist()
        words = _words(rng, rng.integers(5, 40)) + chosen
        rng.shuffle(words)
        texts.append(" ".join(words))
        effects.append(np.mean([_KEYWORDS[word] for word in chosen]))
    return texts, np.array(effects)


def _story_problem(rng, prompts: int) -> tuple[list[str], np.ndarray]:
    texts, effects = [], []
    for _ in range(prompts):
        steps, digits = rng.integers(1, 9), rng.integers(1, 6)
        parts = [f"{_words(rng, 1)[0].title()} has {rng.integers(1, 10**digits)} {_words(rng, 1)[0]}." for _ in range(steps)]
        texts.append(" ".join([*parts, "How many are left?"]))
        effects.append(np.log(steps) + 0.15 * digits)
    return texts, np.array(effects) - np.mean(effects)


def _tokens(log_length: np.ndarray) -> np.ndarray:
    return np.clip(np.round(np.exp(log_length)), 1, 32768).astype(int)


def _epoch(texts: list[str], number: int, log_length: np.ndarray, which: np.ndarray | None = None, first_id: int = 0):
    which = np.arange(len(texts)) if which is None else which
    lengths = _tokens(log_length)
    return [
        LengthRow(Prompt(str(first_id + at), texts[at]), number, int(length))
        for at, length in zip(which.tolist(), lengths, strict=True)
    ]


def _steady(texts, own, noise: float, rng, epochs: int, attending: float = 1.0, samples: int = 1, growth: float = 0.0) -> Epochs:
    out = []
    for number in range(epochs):
        which = np.sort(rng.permutation(len(texts))[: max(1, int(attending * len(texts)))]).repeat(samples)
        out.append(_epoch(texts, number, 5.5 + own[which] + growth * number + noise * rng.standard_normal(len(which)), which))
    return out


def _story(rng, prompts, epochs):
    texts, effects = _story_problem(rng, prompts)
    return _steady(texts, 0.7 * effects + 0.25 * rng.standard_normal(prompts), 0.45, rng, epochs)


def _keyword(rng, prompts, epochs, **how):
    texts, effects = _keyword_text(rng, prompts)
    return _steady(texts, 0.6 * effects + 0.3 * rng.standard_normal(prompts), 0.5, rng, epochs, **how)


def _id_only(rng, prompts, epochs, noise=0.55, **how):
    return _steady(_plain_text(rng, prompts), 0.6 * rng.standard_normal(prompts), noise, rng, epochs, **how)


def _exponential(rng, prompts, epochs):
    texts, own = _plain_text(rng, prompts), 0.9 * rng.standard_normal(prompts)
    return [_epoch(texts, e, 5.5 + own + np.log(rng.exponential(size=prompts) + 1e-9)) for e in range(epochs)]


def _additive(rng, prompts, epochs):
    texts, own = _plain_text(rng, prompts), 300 + rng.gamma(2, 60, prompts)
    return [_epoch(texts, e, np.log(np.maximum(1, own + 90 * rng.standard_normal(prompts)))) for e in range(epochs)]


def _drifting(rng, prompts, epochs):
    texts, own, out = _plain_text(rng, prompts), 0.5 * rng.standard_normal(prompts), []
    for number in range(epochs):
        out.append(_epoch(texts, number, 5.5 + own + 0.15 * number + 0.4 * rng.standard_normal(prompts)))
        own = 0.85 * own + 0.3 * rng.standard_normal(prompts)
    return out


def _never_recurring(rng, prompts, epochs):
    out = []
    for number in range(epochs):
        texts, effects = _keyword_text(rng, prompts)
        log_length = 5.5 + 0.6 * effects + 0.5 * rng.standard_normal(prompts)
        out.append(_epoch(texts, number, log_length, first_id=number * prompts))
    return out


def _never_recurring_and_plain(rng, prompts, epochs):
    noise = [0.7 * rng.standard_normal(prompts) for _ in range(epochs)]
    return [_epoch(_plain_text(rng, prompts), e, 5.5 + noise[e], first_id=e * prompts) for e in range(epochs)]


def _new_ids_same_text(rng, prompts, epochs):
    texts, own = _plain_text(rng, prompts), 0.6 * rng.standard_normal(prompts)
    return [_epoch(texts, e, 5.5 + own + 0.5 * rng.standard_normal(prompts), first_id=e * prompts) for e in range(epochs)]


def _runaway(rng, prompts, epochs):
    texts, effects = _keyword_text(rng, prompts)
    out = []
    for number in range(epochs):
        log_length = 5 + 0.5 * effects + 0.3 * rng.standard_normal(prompts)
        log_length[rng.random(prompts) < np.clip(0.06 + 0.05 * effects, 0.005, 0.5)] = np.log(4096)
        out.append(_epoch(texts, number, log_length))
    return out


def _long_tail(rng, prompts, epochs):
    """One prompt in eight is ten times as long as the others and stays so; its four samples differ by a twentieth."""
    own = np.where(np.arange(prompts) % 8 == 3, rng.uniform(250, 350, prompts), 14 + 7 * rng.geometric(0.25, prompts))
    which = np.arange(prompts).repeat(4)
    texts = _plain_text(rng, prompts)
    return [_epoch(texts, e, np.log(own[which]) + 0.05 * rng.standard_normal(len(which)), which) for e in range(epochs)]


def _lognormal(rng, prompts, epochs):
    """Four samples of each prompt, which differ by a fifth."""
    own, which = 5.5 + rng.standard_normal(prompts), np.arange(prompts).repeat(4)
    texts = _plain_text(rng, prompts)
    logs = [own[which] + 0.2 * rng.standard_normal(len(which)) for _ in range(epochs)]
    return [_epoch(texts, number, its, which) for number, its in enumerate(logs)]


KINDS: dict[str, Callable[..., Epochs]] = {
    "story": _story,
    "keyword": _keyword,
    "keyword_half_attending": lambda rng, n, e: _keyword(rng, n, e, attending=0.5),
    "keyword_samples": lambda rng, n, e: _keyword(rng, n, e, attending=0.5, samples=4),
    "id_only": _id_only,
    "id_only_attending_growing": lambda rng, n, e: _id_only(rng, n, e, attending=0.5, growth=0.25),
    "id_only_samples": lambda rng, n, e: _id_only(rng, n, e, attending=0.5, samples=4),
    "id_only_without_noise": lambda rng, n, e: _id_only(rng, n, e, noise=0.0),
    "exponential": _exponential,
    "additive": _additive,
    "drifting": _drifting,
    "never_recurring": _never_recurring,
    "never_recurring_and_plain": _never_recurring_and_plain,
    "new_ids_same_text": _new_ids_same_text,
    "chance": lambda rng, n, e: _steady(_plain_text(rng, n), np.zeros(n), 0.7, rng, e),
    "runaway": _runaway,
}
# For whole rollouts, not for what orders prompts: samples of a group, and a tail that sets a step's time.
TAILS: dict[str, Callable[..., Epochs]] = {"long_tail": _long_tail, "lognormal": _lognormal}
