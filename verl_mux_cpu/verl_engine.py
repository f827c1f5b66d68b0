"""verl's engines of FSDP's modules for device "cpu", on which they run as they are. Imported after `verl.workers.engine`.

Runs in every process that imports that module.
"""

from __future__ import annotations

from typing import Any

import verl.utils.model
from verl.workers.engine.base import EngineRegistry

for _backends in EngineRegistry._engines.values():
    for _name in ("fsdp", "fsdp2", "veomni"):
        if "cuda" in (_devices := _backends.get(_name, {})):
            _devices.setdefault("cpu", _devices["cuda"])


def load_critic(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
    """In the place of verl's `load_valuehead_model`, which asks for flash-attn whatever the config says."""
    from transformers import AutoModelForTokenClassification

    given = {"torch_dtype": torch_dtype, "config": model_config, "trust_remote_code": trust_remote_code}
    return AutoModelForTokenClassification.from_pretrained(local_path, attn_implementation="sdpa", **given)


verl.utils.model.load_valuehead_model = load_critic
