"""The same training with `mux.phase`: it keeps its process, and leaves between two batches.

VERL_MUX_JOB_UID=sums:$(uuidgen) python examples/filler/train_by_phase.py --out runs/sums
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sums import Training

from verl_mux.coordinator.bus.client import connect


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", default="tcp://127.0.0.1:5570")
    parser.add_argument("--pool", default="train")
    parser.add_argument("--out", type=Path, default=Path("runs/sums"))
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    training = Training.resume(options.out / "checkpoint.pt", options.steps)
    mux = connect(options.coordinator, "sums", {"train": [options.pool]}, filler=True)
    while not training.is_over:
        with mux.phase("train") as lease:
            training.to("cuda" if torch.cuda.is_available() else "cpu")
            while not training.is_over and not lease.wanted.is_set():
                training.step()
            training.to("cpu")
        training.save()
    mux.close()
    print(f"step {training.done}: {training.accuracy():.0%} of the unseen sums are right", flush=True)


if __name__ == "__main__":
    main()
