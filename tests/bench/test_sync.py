"""The bench of the weight sync: what its cases allow, and one small run of it."""

import pytest

from bench.sync.links import can_shape
from bench.sync.participant import digest_of, entries_of
from bench.sync.sync_bench import CASES, Case, limit_seconds, over_links, together
from verl_mux.errors import UserError


def test_cases_are_many_uneven_and_named_apart():
    assert len({case.name for case in CASES}) == len(CASES) >= 12
    assert {case.senders for case in CASES} >= {1, 8} and {case.hosts for case in CASES} >= {1, 8}
    assert all(sum(case.shares) == pytest.approx(1) for case in CASES)


@pytest.mark.parametrize(
    ("case", "seconds"),
    [
        (Case(8, 8, 1, "per_pair", 1e6), 8.0),
        (Case(2, 3, 4, "shared", 1e6), 64.0),
        (Case(3, 1, 1, "per_pair", 1e6, uneven=True), 32.0),
        (Case(64, 1, 1, "per_pair", 1e6), 3.2),  # what one interface lets in
    ],
)
def test_what_the_links_allow(case, seconds):
    assert limit_seconds(case, 64_000_000) == pytest.approx(seconds)


def test_the_model_is_the_same_for_all_and_another_in_each_version():
    entries = entries_of(1 << 20)
    assert sum(entry.nbytes for entry in entries) == 1 << 20 and len({entry.nbytes for entry in entries}) > 3
    assert digest_of(entries, 1) == digest_of(entries, 1) != digest_of(entries, 2)


def test_of_several_runs_the_middle_one_counts_and_every_wrong_bit():
    runs = [{"seconds": s, "slow_bytes": n, "slow_bytes_over_model": n / 10, "bit_equal": s != 9} for s, n in
            ((9.0, 31), (2.0, 30), (3.0, 30))]  # fmt: skip
    assert together(runs) == {
        "seconds": 3.0, "slow_bytes": 31, "slow_bytes_over_model": 3.1, "bit_equal": False, "each_seconds": [9.0, 2.0, 3.0]
    }  # fmt: skip
    assert together(runs[1:])["bit_equal"]


def test_without_shaped_links_nothing_is_measured(monkeypatch):
    monkeypatch.setattr("bench.sync.sync_bench.can_shape", lambda: "root")
    with pytest.raises(UserError, match="it lacks root; try --loopback"):
        over_links(["1_to_2x2_per_pair"], 1 << 20)


def test_a_small_run_of_it():
    if (lacking := can_shape()) is not None:
        pytest.skip(f"lacks {lacking}")
    found = over_links(["1_to_2x2_per_pair"], 1 << 20)
    assert (found["links"], found["model_bytes"]) == ("netns", 1 << 20)
    (case,) = found["cases"].values()
    assert set(case) == {
        "senders", "hosts", "workers_per_host", "slow_link", "methods", "limit_seconds"
    }  # fmt: skip
    assert all(it["bit_equal"] for it in case["methods"].values())
    copies = {method: it["slow_bytes_over_model"] for method, it in case["methods"].items()}
    assert copies == pytest.approx({"two_stage": 2, "pull": 4}, rel=0.01)
