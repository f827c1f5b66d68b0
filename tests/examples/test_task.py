"""Problems, their solutions, and the law of their lengths."""

from __future__ import annotations

import random

import pytest
from task import LETTERS, STRATA, Flavour, Problem, draw_distinct, solve

FLAVOUR = Flavour(modulus=10, operators="+-", min_count=4, mean_excess=9.0, max_count=24)
WORKED = Problem(modulus=10, operator="+", numbers=(7, 5), count=3)


def test_a_problem_names_its_count_by_a_letter_and_a_careful_hand_works_every_line():
    assert WORKED.text == "c 7+5"
    assert solve(WORKED, guessed=0.0, rng=random.Random(0)) == "c:7+5=2\nb:5+2=7\na:2+7=9\n#9"


@pytest.mark.parametrize(
    ("operator", "modulus", "answer"), [("+", 10, "9"), ("-", 10, "9"), ("*", 7, "0"), ("+", 7, "1"), ("*", 10, "5")]
)
def test_the_answer_is_the_last_number_on_the_clock(operator, modulus, answer):
    assert Problem(modulus, operator, (7 % modulus, 5), 3).answer == answer


def test_a_guess_is_marked_and_the_next_sum_starts_from_it():
    lines = solve(WORKED, guessed=1.0, rng=random.Random(0)).splitlines()
    assert all(line[5] == "~" for line in lines[:-1])
    assert all(after[4] == before[-1] for before, after in zip(lines, lines[1:-1], strict=False))


def test_worked_sums_are_right_and_half_of_the_guesses_wrong():
    rng, right = random.Random(0), {"=": [], "~": []}
    for _ in range(200):
        for line in solve(Problem(10, "+", (3, 8), 20), guessed=0.3, rng=rng).splitlines()[:-1]:
            right[line[5]].append((int(line[2]) + int(line[4])) % 10 == int(line[6]))
    assert all(right["="])
    assert sum(right["~"]) / len(right["~"]) == pytest.approx(0.5, abs=0.05)
    assert len(right["~"]) / 4000 == pytest.approx(0.3, abs=0.03)


def test_counts_follow_a_law_with_a_long_tail_between_their_bounds():
    counts = [FLAVOUR.count_at(i / 1000) for i in range(1000)]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (FLAVOUR.min_count, FLAVOUR.max_count)
    assert counts[900] >= 1.8 * counts[500]


def test_a_tail_takes_the_place_of_the_laws_last_eighth():
    tailed = Flavour(modulus=10, operators="+-", min_count=2, mean_excess=3.0, max_count=14, tail=(36, 50))
    counts = [tailed.count_at(i / 1000) for i in range(1000)]
    assert counts == sorted(counts)
    assert (counts[874], counts[875], counts[-1]) == (8, 36, 50)
    assert len(LETTERS) == 52 and Problem(10, "+", (1, 2), 27).text == "A 1+2"


def test_every_eight_problems_in_a_row_have_one_count_of_each_stratum():
    problems = draw_distinct(FLAVOUR, 64, random.Random(0), set())
    bounds = [FLAVOUR.count_at(i / STRATA) for i in range(STRATA)]
    for start in range(0, 64, STRATA):
        counts = sorted(problem.count for problem in problems[start : start + STRATA])
        assert all(count >= bound for count, bound in zip(counts, bounds, strict=True))


def test_no_problem_is_drawn_twice():
    taken: set[Problem] = set()
    train = draw_distinct(FLAVOUR, 480, random.Random(0), taken)
    assert len(set(train)) == 480
    assert not set(train) & set(draw_distinct(FLAVOUR, 32, random.Random(1), taken))


def test_a_flavour_with_too_few_problems_is_refused():
    with pytest.raises(ValueError, match="too few problems"):
        draw_distinct(Flavour(3, "+", 1, 1.0, 2), 100, random.Random(0), set())
