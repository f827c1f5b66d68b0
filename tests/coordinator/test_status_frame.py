"""How old a status may be: never, unless it is dear."""

import pytest

from verl_mux.coordinator import status_frame
from verl_mux.coordinator.bus import messages as m


@pytest.mark.parametrize(("seconds", "waited", "made"), [(0.001, 0.0, 10), (0.001, 0.02, 10), (0.02, 0.0, 2)])
def test_a_dear_status_takes_a_tenth_of_the_time(seconds, waited, made, monkeypatch):
    """waited: seconds in which others had the cores."""
    now, worked, calls = [0.0], [0.0], []

    def describe():
        now[0] += seconds + waited
        worked[0] += seconds
        calls.append(now[0])
        return {"number": len(calls)}

    monkeypatch.setattr(status_frame.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(status_frame.time, "thread_time", lambda: worked[0])
    cached = status_frame.Cached(describe)
    for _ in range(10):
        assert m.decode(cached.frame()).snapshot == {"number": len(calls)}
        now[0] += 0.02
    assert len(calls) == made
