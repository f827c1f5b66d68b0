"""What-if ranks keys on lengths that it knows from a log alone as the simulation of the whole does."""

import pytest

from tests.rollout.lengths.length_generators import generate
from tests.what_if.ranking import agreement, rank


# Twenty-four steps of lengths that spread by e: one long answer more or less is a quarter of a key's gain.
@pytest.mark.parametrize(("kind", "error"), [("long_tail", 0.15), ("lognormal", 0.25)])
def test_the_order_is_that_of_the_whole(kind, error):
    (rows, *_) = generate(kind, seed=3, prompts=240)
    told = agreement(rank(rows))
    assert told["tau"] >= 0.85
    assert told["lost"] <= 0.02
    assert told["error"] <= error
