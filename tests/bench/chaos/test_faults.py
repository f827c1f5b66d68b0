from bench.chaos.faults import KINDS, POINTS, TYPES, draw

JOBS = ["a", "b"]


def test_a_seed_always_gives_the_same_schedule_and_another_gives_another():
    assert draw(7, 60.0, JOBS) == draw(7, 60.0, JOBS) != draw(8, 60.0, JOBS)


def test_everything_is_drawn_within_the_schedule_and_at_every_message_and_point():
    drawn = [fault for seed in range(300) for fault in draw(seed, 60.0, JOBS)]
    assert {fault.kind for fault in drawn} == set(KINDS)
    assert all(0 < fault.at < 60.0 for fault in drawn)
    points = {tuple(fault.die_at.split(":")[:2]) for fault in drawn if fault.die_at}
    assert points == {(kind, point) for kind in TYPES for point in POINTS}
