"""Two real engines on the CPU take turns on a device that has what their certificate says; one more ends in a clear error."""

import pytest
import torch

pytest.importorskip("sglang")
from bench.memory_cycles import make_model
from tests.gpu.engine_process import PARAMETERS
from tests.gpu.turns import limits, turns_on

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(torch.cuda.is_available(), reason="the bed is for machines without CUDA")]
NAMES = ("first", "second")


def test_engines_take_turns_within_their_certificate_and_one_too_many_says_who_holds_what(tmp_path, forking):
    make_model(tmp_path / "model", PARAMETERS)
    certified = limits(tmp_path / "model", NAMES)
    with turns_on(tmp_path, NAMES, certified.total, forking) as run:
        run.take(4)
        run.join("third")
        run.take(2)
    told = run.told
    assert (told.turns, told.failures) == (6, [])
    assert 0.95 * certified.total < told.peak <= certified.total
    assert told.tags == {tag: pytest.approx(size, rel=0.05) for tag, size in certified.tags.items()}
    (refused,) = told.ended
    assert refused.startswith("third ended: out of memory on r0") and "held by" in refused and "first (pid" in refused
