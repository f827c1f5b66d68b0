"""Number sequences on a clock: what a problem is, how it is worked, how a demonstration goes wrong.

A problem gives two numbers, an operation and a count, the count as a letter (c stands for 3):

    c 7+5

Each line of the worked solution combines the last two numbers, keeps the remainder modulo the flavour's modulus
(10 here) and counts down. The last number is the answer:

    c:7+5=2
    b:5+2=7
    a:2+7=9
    #9

One wrong sum spoils everything after it, so long problems are hard, and the length of a solution is given by its
problem. The counts follow a geometric law: most are small, a few several times larger.
Demonstrations are written by a hasty hand: some sums it works out, others it only guesses, which it marks by writing
~ for =, and half of its guesses are wrong. A model that imitates it guesses as often, and is right only some of the time.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
STRATA = 8  # of the counts' law; this many problems in a row have one count from each
WORKED, GUESSED = "=", "~"
WRONG_GUESSES = 0.5
ATTEMPTS = 1000  # at a problem not drawn before
OPERATIONS = {"+": lambda x, y: x + y, "-": lambda x, y: x - y, "*": lambda x, y: x * y}


@dataclass(frozen=True)
class Flavour:
    """How problems are drawn. The modulus is at most 10 (a number is one digit), a count at most 52 (one letter).

    tail: lowest and highest count of the longest problems, one in `STRATA`, where the law's own end is not far enough out.
    """

    modulus: int
    operators: str
    min_count: int
    mean_excess: float  # mean of the count above its minimum, before the law is cut at the maximum
    max_count: int
    tail: tuple[int, int] | None = None

    def count_at(self, quantile: float) -> int:
        """The count at this quantile, in [0, 1), of the geometric law cut at the maximum."""
        if self.tail and (beyond := quantile * STRATA - (STRATA - 1)) >= 0:
            return self.tail[0] + int(beyond * (self.tail[1] - self.tail[0] + 1))
        log_stay = math.log(self.mean_excess / (1 + self.mean_excess))
        whole = 1 - math.exp(log_stay * (self.max_count - self.min_count + 1))
        return self.min_count + int(math.log1p(-quantile * whole) / log_stay)


@dataclass(frozen=True)
class Problem:
    """Two numbers below the modulus, the operator that combines them, and how many times."""

    modulus: int
    operator: str
    numbers: tuple[int, int]
    count: int

    @property
    def text(self) -> str:
        first, second = self.numbers
        return f"{LETTERS[self.count - 1]} {first}{self.operator}{second}"

    @property
    def answer(self) -> str:
        return solve(self, guessed=0.0, rng=random.Random(0)).rpartition("#")[2]


def draw(flavour: Flavour, rng: random.Random, quantile: float | None = None) -> Problem:
    """A random problem; `quantile` fixes where in the law its count lies."""
    count = flavour.count_at(rng.random() if quantile is None else quantile)
    numbers = (rng.randrange(1, flavour.modulus), rng.randrange(1, flavour.modulus))
    return Problem(flavour.modulus, rng.choice(flavour.operators), numbers, count)


def draw_distinct(flavour: Flavour, size: int, rng: random.Random, taken: set[Problem]) -> list[Problem]:
    """`size` problems not in `taken` (which grows by them); every `STRATA` in a row spread evenly over the law.

    Spread so, steps of training differ less in difficulty and in length than they would by chance.
    Raises ValueError when the flavour has too few problems.
    """
    problems: list[Problem] = []
    while len(problems) < size:
        for stratum in rng.sample(range(STRATA), STRATA):
            problem = _draw_new(flavour, stratum, rng, taken)
            taken.add(problem)
            problems.append(problem)
    return problems[:size]


def _draw_new(flavour: Flavour, stratum: int, rng: random.Random, taken: set[Problem]) -> Problem:
    for _ in range(ATTEMPTS):
        problem = draw(flavour, rng, (stratum + rng.random()) / STRATA)
        if problem not in taken:
            return problem
    raise ValueError(f"{flavour} has too few problems: {len(taken)} drawn, no new one in {ATTEMPTS} attempts")


def solve(problem: Problem, guessed: float, rng: random.Random) -> str:
    """The worked solution; each sum is guessed with probability `guessed`."""
    x, y = problem.numbers
    lines = []
    for letter in reversed(LETTERS[: problem.count]):
        result, mark = OPERATIONS[problem.operator](x, y) % problem.modulus, WORKED
        if rng.random() < guessed:
            result, mark = _guess(result, problem.modulus, rng), GUESSED
        lines.append(f"{letter}:{x}{problem.operator}{y}{mark}{result}")
        x, y = y, result
    return "\n".join([*lines, f"#{y}"])


def _guess(right: int, modulus: int, rng: random.Random) -> int:
    if rng.random() < WRONG_GUESSES:
        return (right + rng.randrange(1, modulus)) % modulus
    return right
