"""The supervised warm-up: imitate hasty demonstrations until the policy has partial skill."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain, islice

import torch
from jobs import Warmup
from muon import Muon
from task import Flavour, draw, solve
from torch.nn import functional

IGNORED = -100
BATCHES_SORTED_TOGETHER = 8  # of equal length each, so that little is padding
RAMP, DECAY = 5, 0.4  # learning rate: updates to reach its height; share of all updates in which it falls to 0


def chat(tokenizer, text: str) -> list[int]:
    """Token ids of the prompt as verl's agent loop renders it."""
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(rendered, add_special_tokens=False)["input_ids"]


def warm_up(model, tokenizer, flavour: Flavour, warmup: Warmup, rng: random.Random) -> Iterator[float]:
    """Trains in place, yielding the loss (nats a token) of each update."""
    optimizers = _optimizers(model, warmup)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, _trapezoid(warmup.updates)) for optimizer in optimizers]
    careful = _batches(tokenizer, flavour, 0.0, warmup.batch, rng)
    hasty = _batches(tokenizer, flavour, warmup.guessed, warmup.batch, rng)
    model.train()
    for ids, labels in chain(islice(careful, warmup.careful), islice(hasty, warmup.hasty)):
        loss = _loss(model, ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in (*optimizers, *schedules):
            part.step()
        model.zero_grad()
        yield loss.item()


def _optimizers(model, warmup: Warmup) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the rest: with AdamW alone a minute is too short to learn to add."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    return [
        Muon(matrices, lr=warmup.matrix_lr),
        torch.optim.AdamW(others, lr=warmup.other_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _trapezoid(updates: int):
    return lambda done: min(1.0, (done + 1) / RAMP, (updates - done) / (DECAY * updates))


def _batches(tokenizer, flavour: Flavour, guessed: float, size: int, rng: random.Random) -> Iterator[tuple]:
    """Batches of (input ids, labels), each int64 (batch, longest): prompts and padding are not learnt."""
    while True:
        pairs = []
        for _ in range(size * BATCHES_SORTED_TOGETHER):
            problem = draw(flavour, rng)
            solution = solve(problem, guessed, rng) + tokenizer.eos_token
            pairs.append((chat(tokenizer, problem.text), tokenizer(solution)["input_ids"]))
        pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        starts = rng.sample(range(0, len(pairs), size), BATCHES_SORTED_TOGETHER)
        yield from (_padded(pairs[start : start + size], tokenizer.pad_token_id) for start in starts)


def _padded(pairs: list[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [torch.tensor(prompt + solution) for prompt, solution in pairs]
    labels = [torch.tensor([IGNORED] * len(prompt) + solution) for prompt, solution in pairs]
    stack = torch.nn.utils.rnn.pad_sequence
    return stack(rows, batch_first=True, padding_value=pad), stack(labels, batch_first=True, padding_value=IGNORED)


def _has_bf16_products() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def _loss(model, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    # bf16 products are nearly twice as fast on CPUs that have them, and slow where they are emulated; the weights stay fp32.
    with torch.autocast("cpu", torch.bfloat16, enabled=_has_bf16_products()):
        logits = model(input_ids=ids[:, :-1]).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED)
