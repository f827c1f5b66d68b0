"""Whether a response ended by itself, where the engine says that it was aborted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any


def has_ended(token_ids: Sequence[int], sampling_params: dict[str, Any], eos_token_ids: Collection[int]) -> bool:
    """Did an abort cross a response's end? The engine would write past its end of sequence if it went on."""
    stops = set(sampling_params.get("stop_token_ids") or ())
    if not sampling_params.get("ignore_eos"):
        stops.update(eos_token_ids)
    return bool(token_ids) and token_ids[-1] in stops


def eos_token_ids(tokenizer_manager: Any) -> set[int]:
    """As SGLang's scheduler has them: of the model's config, and of the tokenizer."""
    found = set(tokenizer_manager.model_config.hf_eos_token_id or ())
    tokenizer = tokenizer_manager.tokenizer
    if tokenizer is not None:
        found.update(getattr(tokenizer, "additional_stop_token_ids", None) or ())
        found |= {tokenizer.eos_token_id} - {None}
    return found
