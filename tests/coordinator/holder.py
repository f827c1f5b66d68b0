"""A job for the tests of death: holds a rollout lease, with a grandchild as its device-holding member.

python holder.py ADDRESS {reported|carried|none}: prints its grandchild's pid once it holds the lease, then waits for a
line on stdin and exits without giving anything back.
"""

import os
import subprocess
import sys

from verl_mux.coordinator.bus.client import connect
from verl_mux.coordinator.bus.members import UID_VARIABLE, member_of

address, membership = sys.argv[1:]
mux = connect(address, "a", {"rollout": ["r0"], "train": ["t0"]}, uid=os.environ.get(UID_VARIABLE) or f"a:{os.getpid()}")
pid = 0
if membership != "none":
    environment = {name: value for name, value in os.environ.items() if name != UID_VARIABLE}
    if membership == "carried":
        environment[UID_VARIABLE] = mux.uid
    pid = subprocess.Popen(["sleep", "600"], env=environment, stdout=subprocess.DEVNULL).pid
if membership == "reported":
    mux.members([member_of(pid)])
mux.acquire("rollout", step=1)
mux.progress(1, 2)
print(pid, flush=True)
sys.stdin.readline()
