"""A tiny model that learns to add modulo 97 from two thirds of all pairs; the rest shows whether it understood.

`Training.resume` -> `step`... -> `save`, at any moment and as often as you like: what is on disk is always whole.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

MODULUS = 97
_WIDTH, _BATCH, _SEED = 128, 512, 1


class Training:
    def __init__(self, path: Path, steps: int) -> None:
        torch.manual_seed(_SEED)
        self.path, self.steps, self.done = path, steps, 0
        self.device = torch.device("cpu")
        self.model = torch.nn.Sequential(
            torch.nn.Embedding(MODULUS, _WIDTH), torch.nn.Flatten(), torch.nn.Linear(2 * _WIDTH, 4 * _WIDTH), torch.nn.ReLU(),
            torch.nn.Linear(4 * _WIDTH, MODULUS),
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.3)
        pairs = torch.cartesian_prod(torch.arange(MODULUS), torch.arange(MODULUS))
        pairs = pairs[torch.randperm(len(pairs))]
        self.seen, self.unseen = pairs[: 2 * len(pairs) // 3], pairs[2 * len(pairs) // 3 :]

    @classmethod
    def resume(cls, path: Path, steps: int) -> Training:
        """From the checkpoint there, if there is one. steps: in all, those before it included."""
        training = cls(path, steps)
        if path.exists():
            kept = torch.load(path, weights_only=True)
            training.done = kept["done"]
            training.model.load_state_dict(kept["model"])
            training.optimizer.load_state_dict(kept["optimizer"])
        return training

    @property
    def is_over(self) -> bool:
        return self.done >= self.steps

    def to(self, device: str) -> None:
        """Model and optimizer: on a GPU while its node is held, off it before it is given back."""
        self.device = torch.device(device)
        self.model.to(self.device)
        for state in self.optimizer.state.values():
            state.update({name: value.to(self.device) for name, value in state.items() if name != "step"})
        if self.device.type == "cpu" and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def step(self) -> float:
        """One batch, drawn by the number of the step, so that a resumed training goes on as it would have. Returns the loss."""
        draw = torch.Generator().manual_seed(self.done)
        pairs = self.seen[torch.randint(len(self.seen), (_BATCH,), generator=draw)].to(self.device)
        loss = torch.nn.functional.cross_entropy(self.model(pairs), pairs.sum(1) % MODULUS)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.done += 1
        return loss.item()

    @torch.no_grad()
    def accuracy(self) -> float:
        """On pairs that it was never trained on."""
        pairs = self.unseen.to(self.device)
        return (self.model(pairs).argmax(1) == pairs.sum(1) % MODULUS).float().mean().item()

    def save(self) -> None:
        """A process that is killed in here leaves the checkpoint before."""
        half = self.path.with_suffix(".half")
        torch.save({"done": self.done, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, half)
        os.replace(half, self.path)
