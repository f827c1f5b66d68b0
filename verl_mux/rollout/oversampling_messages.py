"""What over-sampling is told to aim for, and what it asks to be done."""

from __future__ import annotations

from dataclasses import dataclass

LEFTOVERS = ("requeue", "drop")
TOKENS = ("resume", "restart")


@dataclass(frozen=True, slots=True)
class OversamplingPolicy:
    """rate: prompt groups launched beyond those wanted, as a share. leftover: what becomes of the groups cut off.

    tokens: whether a requeued group goes on from its tokens or from its prompt. max_cuts: after so many cuts a group is
    protected. max_failures: a group that lost more samples than this is dropped.
    """

    rate: float = 0.0
    leftover: str = "requeue"
    tokens: str = "resume"
    max_cuts: int = 2
    max_failures: int = 3


@dataclass(frozen=True, slots=True)
class Draw:
    """Draw up to `count` new prompts from the data set and report them with `drawn`."""

    count: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Start one sample of a prompt group; it goes on from `kept` tokens, 0 being the bare prompt.

    budget: it stops after so many more tokens; None: at its end.
    """

    group: str
    sample: int
    kept: int
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort a running sample on whichever engine has it, and report it with `sample_cut`."""

    group: str
    sample: int


@dataclass(frozen=True, slots=True)
class Drop:
    """The group is given up: its samples are padding, masked from the loss and logged as aborted. reason: cut | failed."""

    group: str
    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The step's rollout is over and these groups are its batch. All others are left over or dropped."""

    groups: tuple[str, ...]


Instruction = Draw | Launch | Abort | Drop | Finish
