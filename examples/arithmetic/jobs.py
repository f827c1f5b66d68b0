"""The example's jobs: shapes of model, flavours of problem, lengths of warm-up. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from task import Flavour


@dataclass(frozen=True)
class Shape:
    """The sizes that tell one job's model from another's."""

    hidden: int
    layers: int
    heads: int
    intermediate: int


@dataclass(frozen=True)
class Warmup:
    """How long and on what: careful demonstrations first, then hasty ones, with this share of `guessed` sums.

    In this order because wrong sums hide how to add: mixed in from the start, they more than double the time.
    """

    careful: int  # updates
    hasty: int  # updates
    guessed: float
    batch: int = 16
    matrix_lr: float = 0.02
    other_lr: float = 3e-3

    @property
    def updates(self) -> int:
        return self.careful + self.hasty


@dataclass(frozen=True)
class Job:
    """Everything that makes one job of the example differ from another."""

    shape: Shape
    flavour: Flavour
    warmup: Warmup


JOBS = {
    "fibonacci": Job(
        Shape(hidden=192, layers=4, heads=3, intermediate=576),
        Flavour(modulus=10, operators="+-", min_count=4, mean_excess=9.0, max_count=24),
        Warmup(careful=90, hasty=70, guessed=0.2),
    ),
    "products": Job(
        Shape(hidden=256, layers=3, heads=4, intermediate=768),
        Flavour(modulus=7, operators="+-*", min_count=4, mean_excess=8.0, max_count=23),
        Warmup(careful=90, hasty=70, guessed=0.2),
    ),
    # Four fifths of a batch's responses are done in two fifths of its time; little computing beside the engine's steps.
    "long_tail": Job(
        Shape(hidden=128, layers=2, heads=2, intermediate=384),
        Flavour(modulus=10, operators="+-", min_count=2, mean_excess=3.0, max_count=14, tail=(36, 50)),
        Warmup(careful=200, hasty=80, guessed=0.2),
    ),
}
