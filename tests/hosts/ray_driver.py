"""Stands for verl's driver: connects to its Ray cluster, and writes which host answers under which custom resource."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import ray


@ray.remote(num_cpus=0)
def where() -> tuple[str, str]:
    return socket.gethostname(), os.environ["VERL_MUX_JOB_UID"]


def main() -> None:
    out, what = sys.argv[1:]
    ray.init(log_to_driver=False)
    names = sorted(name for name in ray.cluster_resources() if name.startswith("mux_"))
    found = {name: ray.get(where.options(resources={name: 1e-4}, num_gpus=0).remote()) for name in names}
    told = {"host": socket.gethostname(), "nodes": found, "gpus": ray.cluster_resources()["GPU"]}
    told["uid"] = os.environ["VERL_MUX_JOB_UID"]
    half = Path(f"{out}.half")
    half.write_text(json.dumps(told))
    half.rename(out)
    if what == "wait":
        time.sleep(600)


if __name__ == "__main__":
    main()
