"""`verl-mux plan --sync FILE`: who sends what to whom in a weight sync, what that costs, and what the other ways would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_mux.errors import UserError
from verl_mux.sync.planning.plan import choose, describe
from verl_mux.sync.planning.topology import read_topology
from verl_mux.yaml_file import read_yaml


def sync_plan(path: Path) -> dict[str, Any]:
    """`methods`: seconds and bytes by class of link, of each way that is possible; `flows`: of the one that is chosen.

    Raises:
        UserError: what is wrong in the file.
    """
    given = read_yaml(path)
    if not isinstance(given, dict):
        raise UserError(f"{path} must hold keys: model_bytes, senders, hosts, links")
    topology, model_bytes = read_topology(given)
    plan, costs = choose(topology, model_bytes)
    methods = {method: {"seconds": it.seconds, "bytes": it.nbytes} for method, it in costs.items()}
    return {
        "model_bytes": model_bytes,
        "chosen": plan.method,
        "methods": methods,
        "flows": describe(plan, topology, model_bytes),
    }


def sync_plan_lines(found: dict[str, Any]) -> list[str]:
    lines = [f"{found['model_bytes'] / 2**30:.2f} GiB of weights go by {found['chosen']}"]
    for method, cost in found["methods"].items():
        classes = ", ".join(f"{link} {nbytes / 2**30:.2f} GiB" for link, nbytes in cost["bytes"].items() if nbytes)
        lines.append(f"  {method:<10} {cost['seconds']:10.2f} s   {classes}")
    lines += [f"  {it['from']} -> {it['to']}: {it['bytes'] / 2**30:.2f} GiB, {it['link']}" for it in found["flows"]]
    return lines
