"""What a job would know of lengths before it draws them: what its predictor learns from the prompts' own earlier responses, where
prompts recur in the log; else an order as good as a learning predictor's. Texts are in no log, so what they tell is left out."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np

from verl_mux.rollout.lengths.predictor import LengthPredictor, make_predictor
from verl_mux.rollout.lengths.rows import LengthRow, Prompt
from verl_mux.what_if.recording import Group

TAU = 0.5  # rank agreement of predicted and true lengths, as a learning predictor reaches on known data
# Those whose order is known without the prompts' texts.
BY_ID = ("default", "fifo", "history", "history_mean")


class Foresight:
    """prompt(of a drawn group) -> what a predictor of this kind may be asked about.

    learns: name of the predictor that the job learns with; None: it is taken to reach an agreement of `tau`.
    """

    def __init__(self, learns: str | None, seed: int, tau: float = TAU) -> None:
        self._learns, self._guess = learns, _Guess(tau, random.Random(seed))

    def predictor(self) -> LengthPredictor:
        """A fresh one."""
        return self._guess if self._learns is None else make_predictor(self._learns)

    def prompt(self, name: str, group: Group) -> Prompt:
        """name: of this draw."""
        if self._learns is not None:
            return Prompt(group.prompt or name, "")
        self._guess.true[name] = sum(sample.tokens for sample in group.samples) / len(group.samples)
        return Prompt(name, "")


class _Guess:
    """True lengths with as much noise as leaves a rank agreement of tau (of a bivariate normal, tau = 2/pi asin r; Greiner
    1909)."""

    def __init__(self, tau: float, chance: random.Random) -> None:
        self.true: dict[str, float] = {}  # mean tokens of a group by its name
        self._tau, self._random = tau, chance
        self._noise: dict[str, float] = {}  # asked twice, it says the same

    def observe(self, rows: Sequence[LengthRow]) -> None:
        """Nothing to learn."""

    def predict(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """Logarithms of tokens, (prompts,)."""
        true = np.log([max(self.true[prompt.id], 1.0) for prompt in prompts])
        r = math.sin(math.pi * self._tau / 2)
        noise = float(true.std()) * math.sqrt(1 / r**2 - 1) if r > 0 else 0.0
        return true + noise * np.array([self._noise.setdefault(prompt.id, self._random.gauss(0, 1)) for prompt in prompts])
