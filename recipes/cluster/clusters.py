"""Run a command while the hosts of a run file's nodes are one Ray cluster, and each has an agent.

    python clusters.py RUN.yaml --via "ssh {host}" -- verl-mux run RUN.yaml --submit http://ADDRESS:20002

Without a command cluster and agents go on until this program is ended. With --print it starts nothing and prints each `ray start`
with its host. Runs on the machine of `verl-mux run`, whose ADDRESS `bind` or `coordinator` names, and holds the cluster's head
there, with Ray's job server. `--via` is what starts a command on a host. Each host is one `ray start`, with the GPUs of its
nodes and a resource `mux_NODE` for each. What runs on a host is started again when it ends, and is ended when its standard input
ends: at the end of this program, or when this machine is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

PORT, OF_NODES = 20_000, 20_010  # the first of the head's ports, and of each other Ray node's
SERVICES = (
    "node-manager-port", "object-manager-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port",
    "runtime-env-agent-port", "metrics-export-port",
)  # fmt: skip
# Bytes. Each Ray node would take 30% of its host's memory, and what sleeps lies there too.
OBJECT_STORE, HEADS_OBJECT_STORE = 10 * 10**9, 2 * 10**9
OF_HEAD = ("port", "ray-client-server-port", "dashboard-port")
# keep COMMAND...: again and again, until standard input ends.
KEEP = """
(trap 'kill "$child" 2>/dev/null; wait; exit' TERM; while :; do "$@" </dev/null & child=$!; wait "$child"; sleep 1; done) &
loop=$!; cat >/dev/null; kill "$loop"; wait
"""
WAIT = """
import sys, time, ray
deadline = time.monotonic() + 600
while True:
    try:
        ray.init(address=sys.argv[1], log_to_driver=False)
        break
    except ConnectionError:
        if time.monotonic() > deadline:
            raise
        time.sleep(1)
seen = {}
while True:  # until two looks agree: a `ray start` that Ray gives up after 30 s has offered its resources for a moment
    now = {offer: node["NodeID"] for node in ray.nodes() if node["Alive"] for offer in node["Resources"]}
    missing = set(sys.argv[2:]) - now.keys()
    if not missing and now == seen:
        break
    if time.monotonic() > deadline:
        sys.exit(f"no Ray node offers {missing or sys.argv[2:]} at {sys.argv[1]}")
    seen = now
    time.sleep(3)
"""


def plan(address: str, pools: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """(host, `ray start`) of each host of the nodes, in a cluster whose head is at that address."""
    hosts: dict[str, list[dict[str, Any]]] = {}
    for node in (node for pool in pools.values() for node in pool["nodes"]):
        hosts.setdefault(node["host"], []).append(node)
    found = []
    for host, nodes in hosts.items():
        gpus = sum(len(node.get("gpu_ids") or ()) or node.get("gpus", 1) for node in nodes)
        resources = json.dumps({f"mux_{node['name']}": 1 for node in nodes})
        options = {"address": address, "num-gpus": gpus, "resources": resources, "object-store-memory": OBJECT_STORE}
        found.append((host, ray_start(OF_NODES, SERVICES, options)))
    return found


def head(ip: str) -> list[str]:
    """The `ray start` of the cluster's head, which offers nothing but the job server."""
    options = {"node-ip-address": ip, "num-cpus": 0, "num-gpus": 0, "temp-dir": "/tmp/verl_mux_ray"}  # the nodes' folder too
    options |= {"object-store-memory": HEADS_OBJECT_STORE, "dashboard-host": ip, "include-dashboard": "true"}
    return [*ray_start(PORT, OF_HEAD + SERVICES, options), "--head"]


def ray_start(first_port: int, services: tuple[str, ...], options: dict[str, Any]) -> list[str]:
    ports = {service: first_port + number for number, service in enumerate(services)}
    # Workers take any free port from the kernel.
    options = {**options, **ports, "min-worker-port": 0, "max-worker-port": 0}
    words = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", "--log-color=false", *words]


def lines(ip: str, pools: dict[str, Any]) -> list[str]:
    """`host: command` of each Ray node that `main` would start."""
    dull = ("--block", "--disable-usage-stats", "--log-color=false")
    nodes = [(ip, head(ip)), *plan(f"{ip}:{PORT}", pools)]
    return [f"{host}: {shlex.join(['ray', *(word for word in words if word not in dull)])}" for host, (_, _, _, *words) in nodes]


def on_host(via: str, host: str, command: list[str], variables: dict[str, str]) -> list[str]:
    words = [word.format(host=host) for word in shlex.split(via)]
    kept = ["env", *(f"{name}={value}" for name, value in variables.items()), "bash", "-c", KEEP, "keep", *command]
    # ssh hands one line to the shell of the host.
    return [*words, shlex.join(kept)] if words and words[0] == "ssh" else [*words, *kept]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the run file")
    parser.add_argument("--dir", type=Path, help="the run's folder, instead of the file's `dir`")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--via", help="what starts a command on a host, with {host} for its name")
    how.add_argument("--print", action="store_true", help="print what would be started where, without the cluster's token")
    parser.add_argument(
        "--pools", type=Path, help="the coordinator's file, where the run file names a coordinator by its address"
    )
    parser.add_argument("--ray", default="", help="more options of `ray start` on each node")
    own, command = sys.argv[1:], []
    if "--" in own:
        own, command = own[: own.index("--")], own[own.index("--") + 1 :]
    parser.add_argument("--at-once", type=int, help="hosts that start up together; all, unless they share one small machine")
    given, command = parser.parse_args(own), command or ["sleep", "infinity"]
    run = yaml.safe_load(given.run.read_text())
    folder = (given.dir or Path(run["dir"])).absolute()
    coordinator = run["coordinator"]
    pools = yaml.safe_load(given.pools.read_text())["pools"] if given.pools else coordinator["pools"]
    address, keys = run.get("bind") or coordinator, Path(run.get("keys") or folder / "keys")
    ip = address.removeprefix("tcp://").rpartition(":")[0]
    cluster, nodes = f"{ip}:{PORT}", plan(f"{ip}:{PORT}", pools)
    if given.print:
        print("\n".join(lines(ip, pools)))
        return 0
    token = folder / "ray_token"
    folder.mkdir(parents=True, exist_ok=True)
    if not keys.exists():
        subprocess.run([sys.executable, "-m", "verl_mux", "keys", str(keys)], check=True)
    if not token.exists():
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    of_jobs = {**{name: str(value) for name, value in (run.get("environment") or {}).items()}, **variables}
    agent = [sys.executable, "-m", "verl_mux", "agent", "--coordinator", address, "--keys", str(keys)]
    agent += ["--log-dir", str(folder / "agents")]
    log = (folder / "clusters.log").open("a")
    kept: list[subprocess.Popen] = []

    def keep(words: list[str]) -> None:
        kept.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True))

    def wait(*offers: str) -> None:
        words = [sys.executable, "-c", WAIT, cluster, *offers]
        if subprocess.run(words, env=environment, stdout=log, stderr=log, check=False).returncode:
            sys.exit(f"clusters.py: the Ray cluster at {cluster} did not come up (log: {log.name})")

    environment = {**os.environ, **variables}
    try:
        keep(on_host("", "", head(ip), of_jobs))
        wait()
        together = given.at_once or len(nodes)
        for first in range(0, len(nodes), together):
            group = dict(nodes[first : first + together])
            for host, words in group.items():
                keep(on_host(given.via, host, [*words, *shlex.split(given.ray)], of_jobs))
            wait(*(f"mux_{node['name']}" for pool in pools.values() for node in pool["nodes"] if node["host"] in group))
        for host, _ in nodes:
            keep(on_host(given.via, host, agent, {}))
        running = subprocess.Popen(command, env=environment, start_new_session=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: running.send_signal(number))
        code = running.wait()
        return code if code >= 0 else 128 - code
    finally:
        for process in kept:
            process.stdin.close()
        for process in kept:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)


if __name__ == "__main__":
    sys.exit(main())
