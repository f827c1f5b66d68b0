"""verl's process groups on the CPU platform. Imported after `verl.utils.distributed`.

verl asks for the backends "cpu:gloo,<device>:<backend>", which torch refuses where the device is the CPU. Runs in every process
that imports that module.
"""

import functools

import verl.utils.distributed as verl_distributed


def on_gloo(initialize):
    """`initialize`, with gloo where no backend is asked for."""

    @functools.wraps(initialize)
    def initialized(timeout_second=None, backend=None):
        return initialize(timeout_second, backend or "gloo")

    vars(initialized)["verl_mux"] = True
    return initialized


if not getattr(verl_distributed.initialize_global_process_group_ray, "verl_mux", False):
    verl_distributed.initialize_global_process_group_ray = on_gloo(verl_distributed.initialize_global_process_group_ray)
