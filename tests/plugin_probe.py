"""Run as a program with a stock command line: what verl is like, with our package beside it or (plugins off) without.

stdout's last line is one JSON object; see `main`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings


def full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import verl

    after_verl = sorted(sys.modules)
    import verl.trainer.ppo.v1  # noqa: F401
    from verl.checkpoint_engine import CheckpointEngineRegistry
    from verl.plugin.platform.platform_manager import PlatformRegistry, get_platform
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
    from verl.workers.engine.base import EngineRegistry

    engines = EngineRegistry._engines
    result = {
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
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main()
