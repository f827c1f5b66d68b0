"""Every bench answers from a checkout, as `verl-mux bench NAME`, with the figure as JSON or one line that says what is wrong."""

from __future__ import annotations

import json
import re

import pytest

from bench import BENCHES

LENGTHS = "".join(
    json.dumps({"id": name, "prompt": name, "epoch": epoch, "length": length}) + "\n"
    for epoch in (0, 1)
    for name, length in (("p", 3), ("q", 5))
)
# What is given, how it ends, and a part of what it says. What starts real jobs or engines is refused before it does.
TRIED = [
    ("mux --steps 1", 2, "--steps is 1"),
    ("leases --rounds 3 --json", 0, "median"),
    ("load --jobs 2 --seconds 1 --outage 1 --json", 0, "{"),
    ("hostile --frames 50 --messages 50 --seconds 1 --json", 0, "exits"),
    ("chaos --schedules 0", 2, "schedules"),
    ("filler --steps 1", 2, "--steps is 1"),
    ("scheduler --jobs 3 --decisions 2 --json", 0, "{"),
    ("log --requests 2 --rounds 1 --json", 0, "{"),
    ("rollout --mode bend", 2, "--mode bend"),
    ("migration --file none.yaml", 2, "none.yaml"),
    ("memory --cycles 0", 2, "--cycles"),
    ("sync --case 9_to_9", 2, "there is no case 9_to_9"),
    ("predictor lengths.jsonl --json", 0, "kendall_tau"),
]


@pytest.mark.parametrize(("line", "code", "says"), TRIED, ids=[line.partition(" ")[0] for line, _, _ in TRIED])
def test_every_bench_answers(run_main, tmp_path, monkeypatch, line, code, says):
    (tmp_path / "lengths.jsonl").write_text(LENGTHS)
    monkeypatch.chdir(tmp_path)
    ended, out, err = run_main("bench", *line.split())
    assert ended == code and says in out + err and "Traceback" not in out + err


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_helps(run_main, name):
    code, out, _ = run_main("bench", name, "--help")
    assert code == 0 and "Usage:" in out and f"bench {name}" in out


def test_every_bench_is_tried():
    assert {re.match(r"\w+", line).group() for line, _, _ in TRIED} == {*BENCHES}
