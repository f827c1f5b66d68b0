"""The bench of the weight sync: what its cases allow, and one small run of it."""

import pytest

from verl_mux.bench.sync.cases import CASES, Case, limit_seconds
from verl_mux.bench.sync.command import bench_sync, over_links
from verl_mux.bench.sync.links import can_shape
from verl_mux.bench.sync.participant import digest_of, entries_of
from verl_mux.errors import UserError
from verl_mux.sync.planning.plan import METHODS


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


def test_a_case_that_is_none_is_named():
    with pytest.raises(UserError, match="there is no case 9_to_9; there are 1_to_1x1_per_pair, "):
        over_links(["9_to_9"], 1 << 20)
    with pytest.raises(UserError, match="--model-mib is 0; it must be at least 1"):
        bench_sync(None, 0, None, False)
    with pytest.raises(UserError, match="--model-mib is 99999999; it must be at least 1 and at most 1048576"):
        bench_sync(None, 99999999, None, False)


@pytest.mark.parametrize("links", ["netns", "buckets"])
def test_a_small_run_of_it(links, monkeypatch):
    if links == "buckets":
        monkeypatch.setattr("verl_mux.bench.sync.links.can_shape", lambda: "root")
    elif (lacking := can_shape()) is not None:
        pytest.skip(f"lacks {lacking}")
    found = over_links(["1_to_2x2_per_pair"], 1 << 20)
    assert (found["links"], found["model_bytes"]) == (links, 1 << 20)
    (case,) = found["cases"].values()
    assert set(case) == {
        "senders", "hosts", "workers_per_host", "slow_link", "methods", "chosen", "limit_seconds"
    }  # fmt: skip
    assert list(case["methods"]) == list(METHODS) and all(it["bit_equal"] for it in case["methods"].values())
    copies = {"two_stage": 2, "relay": 1, "root": 1, "chain": 1, "pull": 4}
    for method, it in case["methods"].items():
        assert it["slow_bytes_over_model"] == pytest.approx(copies[method], rel=0.01)
