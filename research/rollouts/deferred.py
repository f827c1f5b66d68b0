"""Prompts in tail rounds, for a virtual job: by the product's own planner, with its estimates or with an oracle's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from research.rollouts.recorded import PromptGroup, Recording
from verl_mux.rollout.control.length_estimates import Expected
from verl_mux.rollout.control.tail_rounds import DeferPolicy, Estimates, TailRounds
from verl_mux.rollout.lengths.rows import Prompt


class Deferred:
    """A source of prompt groups: a window of an epoch is gathered, and handed out round by round."""

    def __init__(self, recording: Recording, policy: DeferPolicy, batch: int, estimates: Estimates) -> None:
        self._rounds = TailRounds(policy, batch, estimates)
        self._groups = {group.name: group for group in recording.groups}
        size = len(recording.groups) if policy.window is None else policy.window * batch
        self._windows = [epoch[at : at + size] for epoch in recording.epochs for at in range(0, len(epoch), size)]

    def draw(self, count: int) -> list[PromptGroup]:
        """Fewer where the data ends."""
        names = self._rounds.take(count)
        while len(names) < count and self._windows:
            window = self._windows.pop(0)
            self._rounds.gather([group.name for group in window], [group.prompt for group in window])
            names += self._rounds.take(count - len(names))
        return [self._groups[name] for name in names]

    def trained(self, groups: Sequence[PromptGroup]) -> None:
        """What these turned out to be is learnt."""
        if groups:
            self._rounds.trained({group.name: group.lengths for group in groups}, groups[0].epoch)

    @property
    def left(self) -> int:
        """Groups not drawn yet."""
        return self._rounds.left + sum(map(len, self._windows))


class Known:
    """Estimates of who knows all lengths beforehand: what planning could win at most."""

    def __init__(self, recording: Recording) -> None:
        self._lengths = {id(group.prompt): group.lengths for group in recording.groups}  # a prompt object for each draw

    def observe(self, prompt: Prompt, epoch: int, lengths: Sequence[int]) -> None:
        """Nothing to learn."""

    def expect(self, prompts: Sequence[Prompt]) -> Expected:
        """The means that they will have, and their longest."""
        lengths = [self._lengths[id(prompt)] for prompt in prompts]
        mean, longest = (np.array([of(its) for its in lengths], dtype=np.float64) for of in (np.mean, np.max))
        return Expected(mean, np.zeros(len(mean)), longest)

    def knows(self, prompt: Prompt) -> bool:
        """It does."""
        return True
