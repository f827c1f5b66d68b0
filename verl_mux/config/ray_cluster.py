"""Two jobs in one Ray cluster end each other: the second attaches to the first one's TransferQueue controller, and closes it
when it fails. So a job looks before it joins a cluster that is there.
"""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_mux.errors import UserError

# Where a job leaves its name in its cluster's own store.
_KEY, _SPACE = b"verl_mux_job", b"verl_mux"
_CONTROLLER = {"name": "TransferQueueController", "namespace": "transfer_queue"}


def claim(config: DictConfig, job: str) -> None:
    """Leave the job's name in the Ray cluster that it would join; nothing where it starts one of its own.

    Raises:
        UserError: another job runs there.
    """
    import ray
    from ray._private.services import canonicalize_bootstrap_address
    from ray.experimental import internal_kv

    address = canonicalize_bootstrap_address(OmegaConf.select(config, "ray_kwargs.ray_init.address"))
    if address is None or ray.is_initialized():
        return
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except ConnectionError:  # what a cluster leaves that is no more; verl's own connecting says the rest
        return
    try:
        owner = (internal_kv._internal_kv_get(_KEY, namespace=_SPACE) or b"another job").decode()
        if _CONTROLLER in ray.util.list_named_actors(all_namespaces=True):
            raise UserError(
                f"the Ray cluster at {address} is {owner}'s, and two jobs in one cluster end each other: start one for job {job}"
                " (`ray start --head --port=...`), and name it by ray_kwargs.ray_init.address, or `local` for one on this machine"
            )
        internal_kv._internal_kv_put(_KEY, job.encode(), overwrite=True, namespace=_SPACE)
    finally:
        ray.shutdown()
