"""The example's Muon against torch's own."""

from __future__ import annotations

import pytest
import torch
from muon import Muon, orthogonalized


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16)])
def test_singular_values_come_near_one_and_vectors_stay(shape):
    torch.manual_seed(0)
    gradient = torch.randn(shape)
    u, s, vh = torch.linalg.svd(orthogonalized(gradient), full_matrices=False)
    assert float(s.min()) > 0.6 and float(s.max()) < 1.4
    left, _, right = torch.linalg.svd(gradient, full_matrices=False)
    assert torch.trace((left @ right) @ (u @ vh).T) > 0.98 * min(shape)


@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_updates_are_those_of_torch_but_for_its_bf16(shape):
    torch.manual_seed(0)
    start = torch.randn(shape)
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    optimizers = Muon([ours], lr=0.1), torch.optim.Muon([theirs], lr=0.1, weight_decay=0.0)
    for _ in range(3):
        gradient = torch.randn(shape)
        for matrix, optimizer in zip((ours, theirs), optimizers, strict=True):
            matrix.grad = gradient.clone()
            optimizer.step()
    moved = (ours - start).norm()
    assert (ours - theirs).norm() < 0.05 * moved
