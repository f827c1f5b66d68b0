"""Recorded response lengths as the prompt groups that steps draw."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from verl_mux.rollout.lengths.rows import LengthRow, Prompt


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """One prompt in one epoch. name: unique for each draw. lengths: tokens of its responses, one a sample.

    Where other groups of the file have more samples, the missing ones are responses of no tokens.
    """

    name: str
    prompt: Prompt
    epoch: int
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """epochs: the prompt groups of each, in the order in which they are drawn. samples: of each group."""

    epochs: tuple[tuple[PromptGroup, ...], ...]
    samples: int

    @property
    def groups(self) -> tuple[PromptGroup, ...]:
        """Of all epochs, in the order in which they are drawn."""
        return tuple(group for epoch in self.epochs for group in epoch)


def recording(rows: Sequence[LengthRow], seed: int) -> Recording:
    """Rows in any order; rows of one id and epoch are samples of one group. Each epoch's groups come in a random order, as
    a data loader shuffles them."""
    found: dict[int, dict[str, list[LengthRow]]] = {}
    for row in rows:
        found.setdefault(row.epoch, {}).setdefault(row.prompt.id, []).append(row)
    samples = max(len(its) for epoch in found.values() for its in epoch.values())
    rng = random.Random(seed)
    epochs = []
    for number in sorted(found):
        groups = [_group(number, its, samples) for its in found[number].values()]
        rng.shuffle(groups)
        epochs.append(tuple(groups))
    return Recording(tuple(epochs), samples)


def _group(epoch: int, rows: Sequence[LengthRow], samples: int) -> PromptGroup:
    lengths = [row.length for row in rows]
    prompt = rows[0].prompt
    return PromptGroup(f"{prompt.id}@{epoch}", prompt, epoch, (*lengths, *[0] * (samples - len(lengths))))
