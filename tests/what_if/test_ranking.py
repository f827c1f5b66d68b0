"""What-if ranks keys on lengths that it knows from a log alone as the simulation of the whole does."""

import pytest

from tests.rollout.lengths.length_generators import generate
from tests.what_if.ranking import agreement, lengths, rank


# Twenty-four steps of lengths that spread by e: one long answer more or less is a quarter of a key's gain.
@pytest.mark.parametrize(("kind", "error"), [("long_tail", 0.15), ("lognormal", 0.25)])
def test_the_order_is_that_of_the_whole(kind, error):
    (rows, *_) = generate(kind, seed=3, prompts=240)
    told = agreement(rank(rows))
    assert told["tau"] >= 0.85
    assert told["lost"] <= 0.02
    assert told["error"] <= error


def test_a_table_of_requests_and_one_of_distributions_are_read(tmp_path):
    (tmp_path / "requests.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "t,9,10\n" * 4 + "t,9,0\n" * 4)
    (rows,) = lengths(tmp_path / "requests.csv").values()
    assert [(row.prompt.id, row.length) for row in rows] == [("0", 10)] * 4 + [("1", 1)] * 4
    (tmp_path / "cdf.csv").write_text("workload,length_tokens(4k=4096),cdf\nx,10,0.5\nx,30,1.0\n")
    (rows,) = lengths(tmp_path / "cdf.csv").values()
    assert {row.length for row in rows} == {10, 30}
