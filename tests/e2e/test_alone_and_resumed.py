"""The same job alone: resumed from a checkpoint that it wrote while multiplexed, it repeats the numbers it had then."""

from __future__ import annotations

import shutil

import pytest

from tests.e2e import tiny
from tests.e2e.conftest import COMPARED

pytestmark = pytest.mark.e2e

_FROM = 4


@pytest.fixture(scope="module")
def resumed(run, streaming, assets, tmp_path_factory):
    """No coordinator configured: the same keys run the job alone, from the multiplexed run's checkpoint of step 4.

    `streaming` runs beside it and changes nothing.
    """
    directory = tmp_path_factory.mktemp("alone")
    checkpoints = directory / "job" / "checkpoints"
    shutil.copytree(run.directory / "stays" / "checkpoints" / f"global_step_{_FROM}", checkpoints / f"global_step_{_FROM}")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(_FROM))
    process = tiny.start_job("job", tiny.overrides(assets, COMPARED), directory, None)
    assert process.wait(600) == 0, (directory / "job" / "job.log").read_text()[-3000:]
    return directory


def _figures(events: list[dict], key: str) -> dict[int, float]:
    return {e["step"]: e["extra"][key] for e in events if e["event"] == "step"}


@pytest.mark.parametrize("key", ["reward", "loss", "grad_norm", "response_length"])
def test_alone_and_multiplexed_give_the_same_numbers_step_by_step(run, resumed, key):
    events = tiny.events(run.directory, "stays")
    multiplexed = _figures(events, key)
    alone = _figures(tiny.events(resumed, "job"), key)
    assert set(alone) == set(range(_FROM + 1, COMPARED + 1))
    assert alone == {step: multiplexed[step] for step in alone}
    ends = {e["step"]: tiny.ended(e) for e in events if e["event"] == "step"}
    assert run.coordinator_killed < ends[min(alone)], "what is compared came before the coordinator was killed"
