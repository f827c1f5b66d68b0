"""A standing Ray cluster of one machine with Ray's job server, which jobs join or are submitted to.

`python -m tests.e2e.standing URL SECONDS` says what jobs have left in one, as soon as that is nothing, and no later than that.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

CPUS, GPUS = 32, 2
_SERVICES = (
    "port", "dashboard-port", "ray-client-server-port", "node-manager-port", "object-manager-port", "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port", "runtime-env-agent-port", "metrics-export-port",
)  # fmt: skip
_START_S = 120.0


@dataclass
class Standing:
    """`address`: HOST:PORT of Ray; `url`: of its job server; `environment`: what a client needs."""

    address: str
    url: str
    environment: dict[str, str]

    def left_after(self, seconds: float) -> dict[str, list[str]]:
        """What jobs have there: classes of living actors, and states of placement groups."""
        command = [sys.executable, "-m", "tests.e2e.standing", self.url, str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **self.environment})
        return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def standing_cluster(variables: Mapping[str, str]) -> Iterator[Standing]:
    """variables: of the environment of all that runs there."""
    first, token = _free_ports(), {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    ports = [f"--{name}={first + at}" for at, name in enumerate(_SERVICES)]
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:  # names of Ray's sockets have a limit
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats",
            "--node-ip-address=127.0.0.1", f"--num-cpus={CPUS}", f"--num-gpus={GPUS}", "--object-store-memory=200000000",
            f"--temp-dir={folder}", "--include-dashboard=true", "--min-worker-port=0", "--max-worker-port=0", *ports,
        ]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with (Path(folder) / "head.log").open("w") as log:
            head = subprocess.Popen(command, stdout=log, stderr=log, env={**environment, **variables, **token})
        with head:
            try:
                for port in (first + _SERVICES.index("dashboard-port"), first + _SERVICES.index("dashboard-agent-listen-port")):
                    _wait_for(port, head)
                yield Standing(f"127.0.0.1:{first}", f"http://127.0.0.1:{first + 1}", token)
            finally:
                head.terminate()


def _free_ports() -> int:
    while True:
        first = random.SystemRandom().randrange(22_000, 30_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes:
            for at in range(len(_SERVICES)):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", first + at))
            return first


def _wait_for(port: int, head: subprocess.Popen) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            assert head.poll() is None and time.monotonic() < deadline, "the Ray cluster did not start"
            time.sleep(0.1)


def main() -> None:
    from ray.util.state import list_actors, list_placement_groups

    url, deadline = sys.argv[1], time.monotonic() + float(sys.argv[2])
    while True:
        actors = list_actors(url, filters=[("state", "!=", "DEAD")])
        groups = list_placement_groups(url, filters=[("state", "!=", "REMOVED")])
        left = {"actors": [it.class_name for it in actors], "groups": [it.state for it in groups]}
        if not any(left.values()) or time.monotonic() > deadline:
            return print(json.dumps(left))
        time.sleep(0.5)


if __name__ == "__main__":
    main()
