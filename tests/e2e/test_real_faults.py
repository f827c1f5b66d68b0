"""The judge of the real faults; the faults themselves are a command."""

from tests.e2e.real_faults import KINDS, differences


def _found(step: int, seconds: float = 14.0, **changed) -> dict:
    return {"kind": "silent_gap", "replica": 1, "node": "r0", "step": step, "seconds": seconds, "text": "stood still", **changed}


def test_three_stalls_have_to_be_named_each_once_and_nothing_else():
    *_, expected = KINDS["stall"]
    assert differences([_found(5), _found(10), _found(8)], expected) == []
    missing, other = differences([_found(5), _found(8), _found(10, replica=0)], expected)
    assert missing.startswith("not found: ") and "[10]" in missing
    assert other == "too much: silent_gap of step 10: stood still"
    assert len(differences([_found(5), _found(8), _found(10), _found(8)], expected)) == 1
    assert len(differences([_found(5), _found(8), _found(10, seconds=3.0)], expected)) == 2
