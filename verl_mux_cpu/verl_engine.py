"""verl's engines of FSDP's modules for device "cpu", on which they run as they are. Imported after `verl.workers.engine`.

Runs in every process that imports that module.
"""

from verl.workers.engine.base import EngineRegistry

for _backends in EngineRegistry._engines.values():
    for _name in ("fsdp", "fsdp2", "veomni"):
        if "cuda" in (_devices := _backends.get(_name, {})):
            _devices.setdefault("cpu", _devices["cuda"])
