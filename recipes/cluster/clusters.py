"""Run a command while the jobs of a run file have their Ray clusters, one for all or several, and each host has an agent.

    python clusters.py RUN.yaml --via "ssh {host}" -- verl-mux run RUN.yaml

Without a command the clusters and agents go on until this program is ended. With --print nothing is started: it prints each
`ray start` with its host. Runs on the machine of `verl-mux run`, which
`bind` and each job's `ray` name; it holds the head of each cluster. `--via` is what starts a command on a host. Each node of
a cluster's jobs is one `ray start` on the node's host, with the resource `mux_NODE`, the node's GPUs and ports of the cluster's
own: the 50 from the port of `ray`. What runs on a host is started again when it ends, and is ended when its standard input ends:
at the end of this program, or when this machine is gone.
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

BLOCK, PER_NODE = 50, 10  # ports of a cluster; of each of its nodes on one host
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


def plan(run: dict[str, Any], pools: dict[str, Any]) -> list[tuple[str, str, dict[str, str], list[str]]]:
    """(cluster, host, variables, `ray start`) of each node of each cluster that jobs name; by its address.

    Raises:
        SystemExit: the clusters' ports overlap, or one has too many nodes on a host.
    """
    nodes = {node["name"]: node for pool in pools.values() for node in pool["nodes"]}
    clusters: dict[str, list[str]] = {}
    for job in run["jobs"].values():
        if "ray" in job:
            clusters.setdefault(job["ray"], []).extend([*job["nodes"]["train"], *job["nodes"]["rollout"]])
    ports = sorted(int(address.rpartition(":")[2]) for address in clusters)
    if any(b - a < BLOCK for a, b in zip(ports, ports[1:], strict=False)):
        sys.exit(f"clusters.py: the ports of the jobs' `ray` must be {BLOCK} apart; they are {', '.join(map(str, ports))}")
    found = []
    for address, of_jobs in clusters.items():
        places: dict[str, int] = {}
        for node in dict.fromkeys(of_jobs):
            host, about = nodes[node]["host"], nodes[node]
            places[host] = place = places.get(host, 0) + 1
            if place >= BLOCK // PER_NODE:
                sys.exit(f"clusters.py: the cluster at {address} has more than {BLOCK // PER_NODE - 1} nodes on host {host}")
            variables = {"VERL_MUX_NODE": node}
            if about.get("gpu_ids") is not None:
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, about["gpu_ids"]))
            resources = json.dumps({f"mux_{node}": 1})
            options = {"address": address, "num-gpus": about.get("gpus", 1), "resources": resources}
            options["object-store-memory"] = OBJECT_STORE
            first_port = int(address.rpartition(":")[2]) + place * PER_NODE
            found.append((address, host, variables, ray_start(first_port, SERVICES, options)))
    return found


def head(address: str) -> list[str]:
    """The `ray start` of a cluster's head, which offers nothing."""
    ip, _, port = address.rpartition(":")
    # The folder is that of the cluster's nodes too, on each host.
    options = {"node-ip-address": ip, "num-cpus": 0, "num-gpus": 0, "temp-dir": f"/tmp/verl_mux_ray_{port}"}
    options["object-store-memory"] = HEADS_OBJECT_STORE
    return [*ray_start(int(port), OF_HEAD + SERVICES, options), "--head", "--include-dashboard=false"]


def ray_start(first_port: int, services: tuple[str, ...], options: dict[str, Any]) -> list[str]:
    ports = {service: first_port + number for number, service in enumerate(services)}
    # Workers take any free port from the kernel.
    options = {**options, **ports, "min-worker-port": 0, "max-worker-port": 0}
    words = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", "--log-color=false", *words]


def lines(run: dict[str, Any], pools: dict[str, Any]) -> list[str]:
    """`host: command` of each Ray node that `main` would start."""
    heads = [(address, address.rpartition(":")[0], {}, head(address)) for address in addresses(run)]
    dull = ("--block", "--disable-usage-stats", "--log-color=false")
    found = []
    for _, host, variables, (_, _, _, *words) in [*heads, *plan(run, pools)]:
        given = [f"{name}={value}" for name, value in variables.items()]
        found.append(f"{host}: {shlex.join([*given, 'ray', *(word for word in words if word not in dull)])}")
    return found


def addresses(run: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(job["ray"] for job in run["jobs"].values() if "ray" in job))


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
    how.add_argument("--print", action="store_true", help="print what would be started where, without the clusters' token")
    parser.add_argument(
        "--pools", type=Path, help="the coordinator's file, where the run file names a coordinator by its address"
    )
    parser.add_argument("--ray", default="", help="more options of `ray start` on each node")
    own, command = sys.argv[1:], []
    if "--" in own:
        own, command = own[: own.index("--")], own[own.index("--") + 1 :]
    parser.add_argument("--at-once", type=int, help="nodes that start up together; all, unless hosts share one small machine")
    given, command = parser.parse_args(own), command or ["sleep", "infinity"]
    run = yaml.safe_load(given.run.read_text())
    folder = (given.dir or Path(run["dir"])).absolute()
    coordinator = run["coordinator"]
    pools = yaml.safe_load(given.pools.read_text())["pools"] if given.pools else coordinator["pools"]
    if given.print:
        print("\n".join(lines(run, pools)))
        return 0
    address, keys = run.get("bind") or coordinator, Path(run.get("keys") or folder / "keys")
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
    nodes = plan(run, pools)
    log = (folder / "clusters.log").open("a")
    kept: list[subprocess.Popen] = []

    def keep(words: list[str]) -> None:
        kept.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True))

    def wait(cluster: str, *offers: str) -> None:
        words = [sys.executable, "-c", WAIT, cluster, *offers]
        if subprocess.run(words, env=environment, stdout=log, stderr=log, check=False).returncode:
            sys.exit(f"clusters.py: the Ray cluster at {cluster} did not come up (log: {log.name})")

    environment = {**os.environ, **variables}
    try:
        for cluster in addresses(run):
            keep(on_host("", "", head(cluster), of_jobs))
        for cluster in addresses(run):
            wait(cluster)
        together = given.at_once or len(nodes)
        for first in range(0, len(nodes), together):
            group = nodes[first : first + together]
            for _, host, own_variables, words in group:
                keep(on_host(given.via, host, [*words, *shlex.split(given.ray)], {**of_jobs, **own_variables}))
            for cluster in dict.fromkeys(cluster for cluster, *_ in group):
                wait(cluster, *(f"mux_{given['VERL_MUX_NODE']}" for of, _, given, _ in group if of == cluster))
        for host in dict.fromkeys(host for _, host, _, _ in nodes):
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
