"""Every bench answers from a checkout, as `verl-mux bench NAME`, with the figure as JSON or one line that says what is wrong."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench import BENCHES, memory
from verl_mux.errors import Failure

EXAMPLES = Path(__file__).parents[2] / "examples"
LENGTHS = "".join(
    json.dumps({"id": name, "prompt": name, "epoch": epoch, "length": length}) + "\n"
    for epoch in (0, 1)
    for name, length in (("p", 3), ("q", 5))
)
# What is given, and what holds for the figures; how good they are is no test's business.
ANSWERED = [
    (
        "leases --rounds 4",
        lambda it: it["rounds"] == 4 and 0 < it["median_us"] <= it["p99_us"] and 0 < it["fsync_median_us"] <= it["fsync_p99_us"],
    ),
    ("load --jobs 8 --seconds 1 --phases 20 --outage 0.5", lambda it: it["grants"] > 0 and it["all_back_s"] < 60),
    (
        "hostile --frames 200 --messages 200 --rate 400 --seconds 1 --seed 1",
        lambda it: (
            it["exits"] == 0 and it["grants"] > 0 and it["refused"]["frames refused"] >= 200 and "faults" not in it["refused"]
        ),
    ),
    (
        "scheduler --jobs 6 --decisions 3",
        lambda it: it["jobs"] == 6 and 0 < it["p50_ms"] <= it["p99_ms"] == max(it["arrival_p99_ms"], it["departure_p99_ms"]),
    ),
    # Requests, turns, events a turn, rounds.
    ("log --requests 16 --turns 2 --rounds 2", lambda it: (it["events"], it["dropped"]) == (16 * 2 * 4 * 2, 0)),
    (
        "sync --host 0.01",
        lambda it: it["bit_equal"] and it["end_to_end_gb_per_s"] > 0 < it["memcpy_gb_per_s"] and it["model_bytes"] < 2**30 // 100,
    ),
    ("predictor lengths.jsonl", lambda it: "kendall_tau" in it["oracle"]),
]
# What no bench can measure, and what starts real jobs or engines: refused before anything is started.
REFUSED = [
    ("mux --steps 1", "--steps is 1"),
    ("leases --rounds 0", "'--rounds'"),
    ("leases --dir none", "--dir none is no folder"),
    ("load --jobs 2 --seconds 0", "'--seconds'"),
    ("hostile --frames -1", "'--frames'"),
    ("hostile --rate 0", "'--rate'"),
    ("chaos --schedules 0", "schedules"),
    ("chaos --side-by-side 0", "'--side-by-side'"),
    ("chaos --simulated -2", "'--simulated'"),
    ("filler --steps 1", "--steps is 1"),
    ("log --requests 0", "'--requests'"),
    ("log --turns -1", "'--turns'"),
    ("log --rounds 0", "'--rounds'"),
    ("rollout --mode bend", "--mode bend"),
    ("rollout --rate nan", "given 'nan'"),
    ("migration --file none.yaml", "none.yaml"),
    (f"migration --file {EXAMPLES}/demo.yaml", "no job has mux.rollout.migration=true"),
    ("memory --cycles 0", "--cycles"),
    ("sync --case 9_to_9", "there is no case 9_to_9; there are 1_to_1x1_per_pair, "),
    ("sync --case 1_to_1x1_per_pair --loopback 1", "give one of them"),
    ("sync --model-mib 0", "--model-mib is 0; it must be at least 1"),
    ("sync --model-mib 99999999", "--model-mib is 99999999; it must be at least 1 and at most 1048576"),
    ("sync --loopback 1 --host 1", "give one of them"),
    ("sync --loopback 0", "'--loopback'"),
    ("sync --host 9999", "bytes of memory here"),
]


@pytest.mark.parametrize(("line", "holds"), ANSWERED, ids=[line.partition(" ")[0] for line, _ in ANSWERED])
def test_it_answers_with_its_figures(run_main, tmp_path, monkeypatch, line, holds):
    (tmp_path / "lengths.jsonl").write_text(LENGTHS)
    monkeypatch.chdir(tmp_path)
    code, out, err = run_main("bench", *line.split(), "--json")
    assert code == 0 and holds(json.loads(out)), out + err


@pytest.mark.parametrize(("line", "words"), REFUSED, ids=[line for line, _ in REFUSED])
def test_it_is_refused_in_one_line(run_main, tmp_path, monkeypatch, line, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = run_main("bench", *line.split())
    assert (code, out, len(err.splitlines())) == (2, "", 1) and words in err


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_helps(run_main, name):
    code, out, _ = run_main("bench", name, "--help")
    assert code == 0 and "Usage:" in out and f"bench {name}" in out


def test_every_bench_is_tried():
    assert {line.partition(" ")[0] for line, _ in (*ANSWERED, *REFUSED)} == {*BENCHES}


def test_an_engine_that_takes_too_long_is_a_failure(monkeypatch):
    def late(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", late)
    with pytest.raises(Failure, match="the engine did not end within 1500 s"):
        memory.measure(15, 1, 1)
