"""SGLang's part in a stall: its signs of life, and its own profile of what it does once it goes on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from verl_mux.rollout.engine.stall_watch import StallWatch

_PASSES = 5


def install(tokenizer_manager: Any, watch: StallWatch) -> None:
    """Tell `watch` whenever the scheduler sends something: every 50 tokens of a request, and at its end."""
    handle_output = tokenizer_manager._handle_batch_output

    async def and_tell(received):
        watch.sent(time.monotonic())
        await handle_output(received)

    tokenizer_manager._handle_batch_output = and_tell


async def trace(tokenizer_manager: Any, folder: Path) -> None:
    """A profile of the next forward passes, by torch, into `folder`. Returns when the engine has heard of it, so not before it
    goes on."""
    activities = ["CPU", "GPU"] if torch.cuda.is_available() else ["CPU"]
    await tokenizer_manager.start_profile(output_dir=str(folder), num_steps=_PASSES, activities=activities, with_stack=False)
