"""A training that knows nothing of verl_mux but that it may be asked to leave: it resumes, and stops at SIGTERM.

    verl-mux hold --pool train -- python examples/filler/train_held.py --out runs/sums

The checkpoint that it writes every few steps is what counts. The one at SIGTERM is extra: half a second may be too short for it.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

import torch
from sums import Training


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/sums"))
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--save-every", type=int, default=100)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    asked_to_leave = []
    signal.signal(signal.SIGTERM, lambda *_: asked_to_leave.append(True))

    training = Training.resume(options.out / "checkpoint.pt", options.steps)
    training.to("cuda" if torch.cuda.is_available() else "cpu")
    print(f"from step {training.done}", flush=True)
    while not training.is_over and not asked_to_leave:
        training.step()
        if training.done % options.save_every == 0:
            training.save()
    training.save()
    print(f"step {training.done}: {training.accuracy():.0%} of the unseen sums are right", flush=True)
    if not training.is_over:
        raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
