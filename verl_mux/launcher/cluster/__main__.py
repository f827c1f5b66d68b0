"""`python -m verl_mux.launcher.cluster SPEC MODULE ARGUMENTS...`: a job's process on the launcher's machine where its nodes are
on hosts. Starts its Ray cluster there and MODULE, verl's driver, on the head; its exit code is the driver's.
"""

from __future__ import annotations

import os
import sys

import msgspec

from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.errors import Failure, UserError
from verl_mux.launcher.cluster.cluster import Cluster
from verl_mux.launcher.cluster.layout import ClusterSpec
from verl_mux.launcher.cluster.mark import uid_on_hosts


def main() -> None:
    given, *command = sys.argv[1:]
    spec = msgspec.json.decode(given, type=ClusterSpec)
    environment = {name: os.environ[name] for name in spec.forward if name in os.environ}
    try:
        code = Cluster(spec, uid_on_hosts(os.environ[UID_VARIABLE]), command, environment).run()
    except (Failure, UserError) as error:
        print(f"verl-mux: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
