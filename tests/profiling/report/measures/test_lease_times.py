"""Holds, waits, bubbles and segments, from a made run of two jobs."""

import pytest

from tests.profiling.made_logs import Lines, read_run
from tests.profiling.made_mux import make_mux_run
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output.page.page import alone
from verl_mux.profiling.report.output.summary import find_all, summarise


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mux")
    return directory, make_mux_run(directory)


@pytest.fixture(scope="module")
def analysis(run):
    return Analysis(read_run(run[0]))


def test_pools_are_told_from_the_phases_of_their_nodes(analysis):
    assert analysis.leases.pools == {"rollout": ["r0"], "train": ["t0"]}


def test_the_bubble_is_what_the_holds_leave(run, analysis):
    held = run[1].held
    (segment,) = [s for s in analysis.leases.segments if s.mode == "interleaved"]
    start, end = segment.window
    for phase in ("rollout", "train"):
        seconds = sum(b - a for _, kind, a, b in held[16:] if kind == phase)
        assert analysis.leases.bubble(phase, segment.window) == pytest.approx(1 - seconds / (end - start), abs=1e-6)


def test_the_run_falls_into_its_segments(analysis):
    assert [segment.mode for segment in analysis.leases.segments] == ["sequential", "interleaved"]


def test_a_wait_names_who_held_the_node(analysis):
    waits = [wait for wait in analysis.leases.waits if wait.job == "products" and wait.end - wait.start > 0.5]
    assert waits
    for wait in waits:
        assert set(wait.behind) == {"fibonacci"}
        assert wait.behind["fibonacci"] == pytest.approx(wait.end - wait.start, abs=0.01)


def test_the_report_sums_waits_and_switches_by_job(run, analysis):
    summary = summarise(analysis)
    fibonacci = summary["jobs"]["fibonacci"]
    held = [(phase, end - start) for job, phase, start, end in run[1].held if job == "fibonacci"]
    assert fibonacci["steps"] == 16
    assert fibonacci["phase_seconds"]["train"] == pytest.approx(sum(s for phase, s in held if phase == "train"), abs=1e-3)
    assert set(fibonacci["waited_behind"]) == {"products"}
    assert fibonacci["wake"]["kv_cache"]["bytes"] == 16 * 25_000_000
    assert fibonacci["sync"]["count"] == 16
    assert summary["memory"] == {"t0": 80_000_000}
    assert set(summary["bubble"]) == {"rollout", "train"}
    assert summary["findings"] == []


def test_alone_has_the_same_phases_and_no_waiting(analysis):
    (segment,) = [s for s in analysis.leases.segments if s.mode == "interleaved"]
    together = [h for h in analysis.leases.holds if h.start >= segment.window[0]]
    for job in ("fibonacci", "products"):
        mine = [h for h in together if h.job == job]
        solo = [h for h in alone(analysis.leases, segment.window) if h.job == job]
        assert [(h.phase, h.step) for h in solo] == [(h.phase, h.step) for h in mine]
        assert [h.end - h.start for h in solo] == pytest.approx([h.end - h.start for h in mine])
        gaps = [b.start - a.end for a, b in zip(solo, solo[1:], strict=False)]
        assert max(gaps) < 0.01


def test_without_a_coordinator_the_trainers_phases_are_the_leases(tmp_path):
    lines = Lines(0, 1)
    lines.add(4.0, "phase", 4.0, {"phase": "rollout", "nodes": ["r0"]}, role="trainer", job="a")
    lines.add(10.0, "phase", 6.0, {"phase": "train", "nodes": ["t0", "t1"]}, role="trainer", job="a")
    lines.write(tmp_path)
    assert summarise(Analysis(read_run(tmp_path)))["bubble"] == {"rollout": 0.6, "train": 0.4}


def coordinator(directory, holds, moves=()):
    lines = Lines(0, 1)
    for job, phase, node, start, end in holds:
        about = {"job": job, "phase": phase, "nodes": [node], "token": 1}
        lines.add(end, "lease_held", end - start, about, role="coordinator", job="coordinator")
    for job, event, end, seconds in moves:
        lines.add(end, event, seconds, {"tag": "weights"}, role="trainer", job=job)
    lines.write(directory)
    return find_all(Analysis(read_run(directory)))


def turns(rollout, train, count=6):
    """Two jobs in turns: (job, phase, node, start, end)."""
    holds, period = [], 2 * max(rollout, train)
    for number in range(count):
        for offset, job in ((0.0, "a"), (period / 2, "b")):
            start = number * period + offset
            holds.append((job, "rollout", "r0", start, start + rollout))
            holds.append((job, "train", "t0", start + rollout, start + rollout + train))
    return holds


@pytest.mark.parametrize(
    ("train", "wake", "expected"),
    [
        (3.0, None, {("uneven_pools", "")}),
        (9.0, None, set()),
        (9.0, 3.0, {("thrashing_switches", "a"), ("thrashing_switches", "b")}),
        (9.0, 0.2, set()),
    ],
)
def test_uneven_pools_and_switches_that_cost_much_of_the_phases_are_found(tmp_path, train, wake, expected):
    holds = turns(10.0, train)
    findings = coordinator(tmp_path, holds, [(job, "wake", end, wake) for job, _, _, _, end in holds if wake])
    assert {(finding.kind, finding.job) for finding in findings} == expected
    assert all("from train to rollout" in finding.advice for finding in findings if finding.kind == "uneven_pools")


def test_an_uncoordinated_run_is_told_from_its_overlaps(tmp_path):
    holds = [("a", "rollout", "r0", 0.0, 10.0), ("b", "rollout", "r0", 1.0, 11.0), ("a", "train", "t0", 10.0, 20.0)]
    coordinator(tmp_path, holds)
    assert [s.mode for s in Analysis(read_run(tmp_path)).leases.segments] == ["uncoordinated"]


FULL = [{"running": 40, "queued": 5, "token_usage": usage, "tokens_per_sec": 900.0} for usage in (0.7, 0.99)] * 15


@pytest.mark.parametrize(("event", "counters"), [("engine_decode", FULL), ("engine_retract", [{"requests": 4}])])
def test_an_engine_short_of_kv_cache_is_found(tmp_path, event, counters):
    lines = Lines(2, 1)
    for number, extra in enumerate(counters):
        lines.add(float(number), event, None, extra, role="server")
    lines.write(tmp_path)
    (finding,) = find_all(Analysis(read_run(tmp_path)))
    assert (finding.kind, finding.worker) == ("kv_starvation", 2)


def test_throughput_is_in_turns_over_one_after_the_other(run, analysis):
    found = summarise(analysis)["throughput"]
    alone = [b - a for a, b in _step_periods(run[1].held, "fibonacci", 0, 4)]
    assert found["alone_s"]["fibonacci"] == pytest.approx(sorted(alone)[len(alone) // 2], abs=0.01)
    ratio = sum(1 / s for s in found["together_s"].values()) * sum(found["alone_s"].values()) / 2
    assert found["ratio"] == pytest.approx(ratio, abs=1e-3)
    assert 1.5 < found["ratio"] < 2.0


def _step_periods(held, job, first, last):
    ends = [end for name, phase, _, end in held if name == job and phase == "train"][first:last]
    return list(zip(ends, ends[1:], strict=False))
