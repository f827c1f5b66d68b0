"""The two benches that load a coordinator and do it harm, on a small scale."""

from bench.hostile import hostile
from bench.load import load


def test_a_few_jobs_take_turns_and_come_back_after_an_outage():
    found = load(jobs=8, seconds=1.0, phases=20.0, outage=0.5)
    assert found["grants"] > 0 and found["all_back_s"] < 60


def test_a_few_hundred_attacks_end_nothing():
    found = hostile(frames=200, messages=200, rate=400.0, seconds=0.5, seed=1)
    assert found["exits"] == 0 and found["grants"] > 0
    assert found["refused"]["frames refused"] >= 200 and "faults" not in found["refused"]
