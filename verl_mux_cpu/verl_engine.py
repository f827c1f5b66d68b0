"""Registers verl's FSDP engines for device "cpu", on which they run as they are. Imported after `verl.workers.engine`.

Runs in every process that imports that module.
"""

from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

for _model_type, _engine in (("language_model", FSDPEngineWithLMHead), ("value_model", FSDPEngineWithValueHead)):
    if "cpu" not in EngineRegistry._engines[_model_type]["fsdp2"]:
        EngineRegistry.register(model_type=_model_type, backend=["fsdp", "fsdp2"], device="cpu")(_engine)
