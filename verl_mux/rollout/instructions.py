"""Messages of a controlled rollout, between rollout/control, the trainer that carries its instructions out, and the workers.

    control --Draw, Launch, Abort, Drop, Finish--> trainer/step_rollout.py --Launch, Abort, Drop--> agent loop worker
    agent loop worker --Report--> trainer/step_rollout.py --> control

Plain data that Ray carries between the trainer's driver and the agent loop workers; pure. A sample is one of the `rollout.n`
responses of a prompt group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Draw:
    """Draw up to `count` new prompts from the data set and report them with `drawn`."""

    count: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Let one sample of a prompt group generate, from its first `kept` tokens on; 0: from the bare prompt.

    budget: it pauses after this many more tokens; None: at its end. The trainer adds what the worker needs besides:
    step: of the training. longest: most tokens of the response; None: as verl limits it. priority: in the engine's queue,
    higher first.
    """

    group: str
    sample: int
    kept: int = 0
    budget: int | None = None
    step: int = 0
    longest: int | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort a running sample on whichever engine has it; a `paused` report follows."""

    group: str
    sample: int


@dataclass(frozen=True, slots=True)
class Drop:
    """The group is given up: its samples are padding, masked from the loss, logged as aborted.

    reason: stale | failed | filtered.
    """

    group: str
    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The step's rollout is over and these groups are its batch. All others are left over or dropped."""

    groups: tuple[str, ...]


Instruction = Draw | Launch | Abort | Drop | Finish


class Report(NamedTuple):
    """What became of a sample since its launch. kind: done | paused | failed; why: eos | length | abort | failed.

    The trainer makes filtered of done where it completes a group whose samples all have the same reward.
    new: tokens since the last report. total: tokens of the response so far. version: of the weights that wrote the new ones.
    """

    kind: str
    group: str
    sample: int
    new: int
    total: int
    version: int
    why: str


class Segment(NamedTuple):
    """Tokens of a response that one version of the weights generated."""

    length: int
    version: int


def merged(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Segments with neighbours of the same version joined: where the weights did not change there is no boundary."""
    out: list[Segment] = []
    for segment in segments:
        if out and out[-1].version == segment.version:
            segment = Segment(out.pop().length + segment.length, segment.version)
        out.append(segment)
    return tuple(out)


class RunningSample(NamedTuple):
    """A sample that may generate. server: whose engine has it; None: no engine does. context: tokens known, its prompt's too.

    tokens: of the response. seconds: in the engine so far.
    """

    group: str
    sample: int
    server: str | None
    context: int
    tokens: int
    seconds: float

    @property
    def name(self) -> str:
        """Of its request in a plan."""
        return f"{self.group}_{self.sample}"
