from collections import Counter

from bench.chaos.faults import POINTS, TYPES
from bench.chaos.judge import judge
from bench.chaos.kills import deaths, reached, run_kills


def test_every_point_of_every_message_comes_as_often_as_asked_for():
    drawn = Counter(point.rpartition(":")[0] for point in deaths(3, seed=1))
    assert drawn == {f"{kind}:{point}": 3 for kind in TYPES for point in POINTS}
    assert deaths(3, seed=1) == deaths(3, seed=1) != deaths(3, seed=2)


def test_a_coordinator_dies_at_one_point_after_the_other_and_nobody_loses_anything(tmp_path):
    points = ["LEASE_RELEASE:written:1", "REGISTER:sent:1", "DEREGISTER:received:1"]
    lines = run_kills(tmp_path / "run", 1, points, ["a", "b"])
    found = judge(lines)
    assert (found.violations, found.lost_steps) == ([], 0)
    assert reached(lines) == {"LEASE_RELEASE:written": 1, "REGISTER:sent": 1, "DEREGISTER:received": 1}
    assert len(found.back_s) == 1 + len(points)  # the first was killed to arm the next
