"""Where a rerun's prompt groups come from: the recording in order, others drawn by chance, and tail rounds over either."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from verl_mux.rollout.control.length_estimates import LengthEstimates
from verl_mux.rollout.control.tail_rounds import DeferPolicy, TailRounds
from verl_mux.rollout.lengths.rows import Prompt
from verl_mux.what_if.foresight import Foresight
from verl_mux.what_if.recording import Group, Recording


def in_order(recording: Recording, seed: int) -> Iterator[Group]:
    """As recorded, and when these are used up, drawn by chance."""
    return itertools.chain(_told(recording), resampled(recording, seed))


def resampled(recording: Recording, seed: int) -> Iterator[Group]:
    """Drawn by chance: what belongs together stays together. Where prompts recur that is all epochs of a prompt, under a name
    that nothing was learnt of yet, or its responses would be known before they are drawn; else a whole step."""
    chance = random.Random(seed)
    draw = _epochs if recording.recurs else _steps
    while True:
        yield from draw(_told(recording), chance)


def _told(recording: Recording) -> list[Group]:
    return [group for group in recording.groups if group.samples]


def _steps(groups: Sequence[Group], chance: random.Random) -> list[Group]:
    by_step: dict[int, list[Group]] = {}
    for group in groups:
        by_step.setdefault(group.step, []).append(group)
    steps = list(by_step.values())
    return [group for step in chance.choices(steps, k=len(steps)) for group in step]


def _epochs(groups: Sequence[Group], chance: random.Random) -> list[Group]:
    by_prompt: dict[str | None, list[Group]] = {}
    for group in groups:
        by_prompt.setdefault(group.prompt, []).append(group)
    drawn = chance.choices(list(by_prompt.values()), k=len(by_prompt))
    again = chance.getrandbits(32)
    out: list[Group] = []
    for epoch in range(max(map(len, drawn))):
        named = [replace(its[epoch], prompt=f"{again}:{at}") for at, its in enumerate(drawn) if epoch < len(its)]
        out += chance.sample(named, len(named))
    return out


class Source(Protocol):
    """draw(count) -> names and groups; trained(lengths by name) after each step."""

    def draw(self, count: int) -> list[tuple[str, Group]]: ...
    def trained(self, lengths: Mapping[str, Sequence[int]]) -> None: ...


class Arrival:
    """As the data loader hands them out. stream: must not end."""

    def __init__(self, stream: Iterator[Group]) -> None:
        self._stream = _named(stream)

    def draw(self, count: int) -> list[tuple[str, Group]]:
        """The next ones."""
        return list(itertools.islice(self._stream, count))

    def trained(self, lengths: Mapping[str, Sequence[int]]) -> None:
        """Nothing to learn."""


class Rounds:
    """`mux.rollout.tail: defer` over a stream that does not end. longest: prompt groups of a window; it ends sooner where a
    prompt comes again, which begins another epoch."""

    def __init__(
        self, stream: Iterator[Group], policy: DeferPolicy, batch: int, samples: int, foresight: Foresight, longest: int
    ) -> None:  # fmt: skip
        self._stream, self._foresight, self._longest = _named(stream), foresight, longest
        self._rounds = TailRounds(policy, batch, LengthEstimates(foresight.predictor(), samples))
        self._groups: dict[str, Group] = {}
        self._next = next(self._stream)
        self._epoch = 0

    def draw(self, count: int) -> list[tuple[str, Group]]:
        """The next round."""
        names = self._rounds.take(count)
        while len(names) < count:
            self._gather()
            names += self._rounds.take(count - len(names))
        return [(name, self._groups.pop(name)) for name in names]

    def trained(self, lengths: Mapping[str, Sequence[int]]) -> None:
        """What these turned out to be is learnt."""
        self._rounds.trained(lengths, self._epoch)

    def _gather(self) -> None:
        seen: set[str] = set()
        window: dict[str, Prompt] = {}
        while len(window) < self._longest:
            name, group = self._next
            if group.prompt in seen:
                break
            seen |= {group.prompt} if group.prompt is not None else set()
            self._groups[name], window[name] = group, self._foresight.prompt(name, group)
            self._next = next(self._stream)
        self._epoch += 1
        self._rounds.gather(list(window), list(window.values()))


def _named(stream: Iterator[Group]) -> Iterator[tuple[str, Group]]:
    """A name for each draw."""
    return ((f"{group.name}#{number}", group) for number, group in enumerate(stream))
