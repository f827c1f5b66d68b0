"""Stands for verl's driver: connects to the Ray that it is given, and writes who answers under which custom resource."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import ray


@ray.remote(num_cpus=0)
def where() -> tuple[str, str, str]:
    return socket.gethostname(), os.environ["VERL_MUX_JOB_UID"], os.environ.get("CUDA_VISIBLE_DEVICES", "")


@ray.remote(num_cpus=0)
class Owner:
    """Where verl would have TransferQueue's controller."""

    def uid(self) -> str:
        return os.environ["VERL_MUX_JOB_UID"]


def main() -> None:
    out, what, address = sys.argv[1:]
    ray.init(address=address, log_to_driver=False)
    controller = {"name": "TransferQueueController", "namespace": "transfer_queue"}
    alone = controller not in ray.util.list_named_actors(all_namespaces=True)
    owner = Owner.options(**controller, get_if_exists=True).remote()
    names = sorted(name for name in ray.cluster_resources() if name.startswith("mux_"))
    found = {name: ray.get(where.options(resources={name: 1e-4}, num_gpus=1).remote()) for name in names}
    told = {"host": socket.gethostname(), "nodes": found, "gpus": ray.cluster_resources()["GPU"]}
    told |= {"alone": alone, "owner": ray.get(owner.uid.remote()), "uid": os.environ["VERL_MUX_JOB_UID"]}
    half = Path(f"{out}.half")
    half.write_text(json.dumps(told))
    half.rename(out)
    if what == "wait":
        time.sleep(600)


if __name__ == "__main__":
    main()
