"""The same job alone: resumed from a checkpoint that it wrote while multiplexed, it repeats the numbers it had then.

What is compared came after the coordinator was killed, and has a rollout and a training phase in it in which the job fenced
itself: it heard nothing for most of a lease, and its memory slept.
"""

from __future__ import annotations

import shutil
from collections import Counter

import pytest

from tests.e2e import tiny
from tests.e2e.conftest import DEFERRED, FENCED, LONG_ROLLOUT, SAVED, fenced

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def compared(run) -> range:
    """Steps from the newest checkpoint before it fenced itself to the step after it did so in both phases."""
    steps = [fenced(run.directory, "stays")[phase] for phase in FENCED]
    return range((min(steps) - 1) // SAVED * SAVED + 1, max(steps) + 2)


@pytest.fixture(scope="module")
def resumed(run, compared, streaming, assets, tmp_path_factory):
    """No coordinator configured: the same keys run the job alone, from the multiplexed run's checkpoint.

    `streaming` runs beside it and changes nothing.
    """
    directory, newest = tmp_path_factory.mktemp("alone"), compared[0] - 1
    checkpoints = directory / "job" / "checkpoints"
    shutil.copytree(run.directory / "stays" / "checkpoints" / f"global_step_{newest}", checkpoints / f"global_step_{newest}")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(newest))
    process = tiny.start_job("job", [*tiny.overrides(assets, compared[-1]), *LONG_ROLLOUT, *DEFERRED], directory, None)
    assert process.wait(600) == 0, (directory / "job" / "job.log").read_text()[-3000:]
    return directory


def _figures(events: list[dict], key: str) -> dict[int, float]:
    return {e["step"]: e["extra"][key] for e in events if e["event"] == "step"}


@pytest.mark.parametrize("key", ["reward", "loss", "grad_norm", "response_length"])
def test_alone_and_multiplexed_give_the_same_numbers_step_by_step(run, resumed, compared, key):
    events = tiny.events(run.directory, "stays")
    multiplexed = _figures(events, key)
    alone = _figures(tiny.events(resumed, "job"), key)
    assert set(alone) == set(compared)
    assert alone == {step: multiplexed[step] for step in alone}
    ends = {e["step"]: tiny.ended(e) for e in events if e["event"] == "step"}
    assert run.coordinator_killed < ends[max(alone)], "what is compared came before the coordinator was killed"


def test_a_rollout_that_was_suspended_resumes_with_its_weights_and_without_a_sync(run):
    step = fenced(run.directory, "stays")["rollout"]
    syncs = Counter(e["step"] for e in tiny.events(run.directory, "stays") if e["event"] == "sync")
    of_weights = [e for e in tiny.events(run.directory, "stays", "server") if e["extra"].get("tag") == "weights"]
    moves = Counter(e["event"] for e in of_weights if e["step"] == step)
    fences = sum(
        e["event"] == "lease_fenced" and e["step"] == step and e["extra"]["phase"] == "rollout"
        for e in tiny.events(run.directory, "stays")
    )
    assert syncs[step] == 1 and moves == {"wake": 1 + fences, "sleep": 1 + fences}
