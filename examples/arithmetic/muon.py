"""Muon (Jordan et al., 2024) in the precision of its gradients: torch.optim.Muon works in bf16, which many CPUs only emulate."""

from __future__ import annotations

import math

import torch

# Coefficients of the quintic Newton-Schulz iteration, as in torch.optim.Muon and in the authors' own code.
COEFFICIENTS, ITERATIONS, EPSILON = (3.4445, -4.7750, 2.0315), 5, 1e-7


def orthogonalized(gradient: torch.Tensor) -> torch.Tensor:
    """About U V^T of the singular value decomposition U S V^T of `gradient` (rows, columns)."""
    a, b, c = COEFFICIENTS
    x = gradient.T if gradient.shape[0] > gradient.shape[1] else gradient
    x = x / x.norm().clamp(min=EPSILON)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if gradient.shape[0] > gradient.shape[1] else x


class Muon(torch.optim.Optimizer):
    """For matrices. Nesterov momentum, no weight decay."""

    def __init__(self, matrices: list[torch.Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """One update. A parameter without a gradient stays as it is."""
        for group in self.param_groups:
            for matrix in (m for m in group["params"] if m.grad is not None):
                average = self.state[matrix].setdefault("average", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonalized(matrix.grad.lerp(average, group["momentum"]))
                rows, columns = matrix.shape
                matrix.add_(update, alpha=-group["lr"] * math.sqrt(max(1.0, rows / columns)))
