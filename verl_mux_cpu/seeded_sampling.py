"""One seed per request on SGLang's CPU engine, so that a job samples the same tokens whichever jobs run beside it.

SGLang passes `sampling_seed` to its sampler in deterministic mode only, and refuses that mode for the torch_native backend. These
hooks let the seed through and draw each token with noise that depends on (seed, position) alone, not on the rest of the batch
(Gumbel-max: argmax(logp + g) samples from p; g from a counter-based hash, splitmix64, of seed, position and token id). Runs in
schedulers; called by verl_mux/rollout/engine/sglang; pure.
"""

from __future__ import annotations

import torch

_GOLDEN, _MIX1, _MIX2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def register(registry, kind) -> None:
    """Hook SGLang's batch info and sampler. `registry`, `kind`: its HookRegistry and HookType."""
    registry.register("sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", add_seeds, kind.AFTER)
    registry.register("sglang.srt.layers.sampler.sampling_from_probs_torch", sample, kind.REPLACE)


def add_seeds(info, *args, **_kwargs):
    """AFTER hook: put each request's seed into the batch. `args`: as from_schedule_batch, the batch among them."""
    batch = next(a for a in args if hasattr(a, "reqs"))
    seeds = [r.sampling_params.sampling_seed or 0 for r in batch.reqs]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)
    return info


def sample(probs: torch.Tensor, sampling_seed: torch.Tensor | None = None, positions: torch.Tensor | None = None) -> torch.Tensor:
    """Token ids of shape (batch,), int32, from `probs` of shape (batch, vocabulary)."""
    if sampling_seed is None:
        return torch.multinomial(probs, num_samples=1).view(-1).to(torch.int32)
    noise = gumbel(sampling_seed, positions, probs.shape[1])
    return (probs.double().log() + noise).argmax(dim=1).to(torch.int32)


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Standard Gumbel noise of shape (batch, vocabulary), float64, a function of (seed, position, token id) alone."""
    row = _splitmix(seeds.long() * _MIX1 + positions.long())
    cell = _splitmix(row[:, None] + torch.arange(vocabulary, device=seeds.device)[None, :] * _GOLDEN)
    uniform = ((cell >> 11) & ((1 << 53) - 1)).double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().log_().neg_()


def _splitmix(x: torch.Tensor) -> torch.Tensor:
    """The splitmix64 finaliser (Steele, Lea, Flood 2014); int64 arithmetic wraps as uint64 does."""
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
