"""Run as a program with a stock command line: what verl is like, with our package beside it and (plugins off) without.

stdout has one JSON object a line for each, in this order; see `look`. Both are forks of a process that has imported
what verl imports of others, which takes most of the time.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import warnings


def full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def look() -> dict:
    import verl

    after_verl = sorted(sys.modules)
    import verl.trainer.ppo.v1  # noqa: F401
    from verl.checkpoint_engine import CheckpointEngineRegistry
    from verl.plugin.platform.platform_manager import PlatformRegistry, get_platform
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
    from verl.workers.engine.base import EngineRegistry

    engines = EngineRegistry._engines
    return {
        "after_verl": after_verl,
        "sglang": [name for name in sys.modules if name.partition(".")[0] in ("sglang", "sgl_kernel")],
        "modes": {name: full_name(cls) for name, cls in TRAINER_REGISTRY.items()},
        "checkpoint_engines": {name: full_name(cls) for name, cls in CheckpointEngineRegistry._registry.items()},
        "platforms": {name: full_name(PlatformRegistry.get(name)) for name in PlatformRegistry.registered_names()},
        "platform": get_platform().device_name,
        "engines": {f"{m}/{b}/{d}": full_name(c) for m, bs in engines.items() for b, ds in bs.items() for d, c in ds.items()},
        "variables": sorted(name for name in os.environ if name.startswith(("VERL", "RAY", "SGLANG"))),
        "sgl_kernel_finders": sum(type(finder).__module__.endswith(".kernel_placeholders") for finder in sys.meta_path),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for name in ("ray", "tensordict", "transformers", "datasets", "torch.distributed.fsdp"):
        importlib.import_module(name)
    for plugins in ("auto", "none"):
        if not (child := os.fork()):
            os.environ["VERL_USE_EXTERNAL_PLUGINS"] = plugins
            print("\n" + json.dumps(look()), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"with plugins {plugins} it failed")


if __name__ == "__main__":
    main()
