"""The figures of the protocol's model."""

from bench.chaos import chaos_bench
from bench.protocol_model.schedules import PLANTED


def test_all_parts_are_counted_and_each_planted_fault_is_found(monkeypatch):
    monkeypatch.setattr(chaos_bench, "KILL_SEEDS", 1)
    monkeypatch.setattr(chaos_bench, "PARTITIONS", 20)
    monkeypatch.setattr(chaos_bench, "PLANTED_SCHEDULES", 60)
    found = chaos_bench.simulate(5, seed=1)
    assert (found["schedules"], found["violations"], found["seeds"]) == (5, 0, "1 to 5")
    assert found["kill_points"]["schedules"] == found["kill_points"]["kills"] == 15 * 3
    assert found["partitions"]["partitions"] >= 20 and found["partitions"]["accepted_after_expiry"] == 0
    assert set(found["planted"]) == set(PLANTED) and all(found["planted"].values())


def test_a_fault_that_is_planted_everywhere_gives_violations(monkeypatch):
    monkeypatch.setattr(chaos_bench, "KILL_SEEDS", 1)
    monkeypatch.setattr(chaos_bench, "PARTITIONS", 20)
    found = chaos_bench.simulate(5, seed=1, plant="token unchecked")
    assert found["violations"] > 0 and found["planted"] == {}
