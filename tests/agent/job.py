"""A process of a job for the tests of hosts.

    python job.py driver ADDRESS JOB NODE...   asks for a lease on the nodes, holds memory on the first, says so, and waits
    python job.py worker NODE                  holds memory on the node, says so, and waits

Its uid stands in VERL_MUX_JOB_UID. Ends with its stdin.
"""

import os
import sys

from verl_mux.coordinator.bus.client import connect
from verl_mux_cpu import device_ledger

role, *rest = sys.argv[1:]
node = rest[0] if role == "worker" else rest[2]
token = 0
if role == "driver":
    address, job, *nodes = rest
    mux = connect(address, job, {"rollout": nodes}, timeout=120.0)
    token = mux.acquire("rollout", step=1).token
os.environ[device_ledger.NODE_VARIABLE] = node
device_ledger.hold({"weights": 1000})
print(f"holds {token}", flush=True)
sys.stdin.readline()
