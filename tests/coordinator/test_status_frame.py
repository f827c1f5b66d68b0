"""How old a status may be: never, unless it is dear."""

import pytest

from verl_mux.coordinator import status_frame
from verl_mux.coordinator.bus import messages as m


@pytest.mark.parametrize(("seconds", "made"), [(0.001, 10), (0.02, 2)])
def test_a_dear_status_takes_a_tenth_of_the_time(seconds, made, monkeypatch):
    now = [0.0]
    calls = []

    def describe():
        now[0] += seconds
        calls.append(now[0])
        return {"number": len(calls)}

    monkeypatch.setattr(status_frame.time, "monotonic", lambda: now[0])
    cached = status_frame.Cached(describe)
    for _ in range(10):
        assert m.decode(cached.frame()).snapshot == {"number": len(calls)}
        now[0] += 0.02
    assert len(calls) == made
