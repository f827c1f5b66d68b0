"""The example's training learns, resumes where it was, and leaves when it is told to."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples" / "filler"


@pytest.fixture
def training(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    from sums import Training

    return Training.resume


def test_a_resumed_training_goes_on_as_if_nothing_had_been(training, tmp_path):
    straight, first = training(tmp_path / "straight.pt", 4), training(tmp_path / "broken.pt", 4)
    losses = [straight.step() for _ in range(4)]
    broken = [first.step(), first.step()]
    first.save()
    second = training(tmp_path / "broken.pt", 4)
    broken += [second.step(), second.step()]
    assert broken == losses and second.is_over
    assert losses[-1] < losses[0]
    assert torch.equal(straight.model[2].weight, second.model[2].weight)


def test_the_held_form_leaves_a_checkpoint_at_sigterm_and_ends_well_when_it_is_through(tmp_path):
    command = [sys.executable, str(FOLDER / "train_held.py"), "--out", str(tmp_path), "--save-every", "1"]
    process = subprocess.Popen([*command, "--steps", "1000000"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "from step 0\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    done = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["done"]
    again = subprocess.run([*command, "--steps", str(done + 2)], stdout=subprocess.PIPE, text=True, timeout=300)
    assert again.returncode == 0 and f"from step {done}" in again.stdout


def test_the_form_by_phase_runs_in_a_lease(tmp_path):
    from bench.coordinator_process import CoordinatorProcess

    with CoordinatorProcess({"pools": {"train": {"nodes": [{"name": "t0"}]}}}) as coordinator:
        command = [sys.executable, str(FOLDER / "train_by_phase.py"), "--out", str(tmp_path), "--steps", "3"]
        done = subprocess.run([*command, "--coordinator", coordinator.address], stdout=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith("step 3: ")
