"""What a coordinator that places nobody brings into its process: each library costs it megabytes and a slower start."""

import subprocess
import sys

SCRIPT = """
import sys
import verl_mux.coordinator.commands
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.server import Coordinator
with Coordinator(make_config({"pools": {"rollout": {"nodes": [{"name": "r0"}]}}})) as coordinator:
    coordinator.snapshot()
print(*sys.modules)
"""


def test_a_coordinator_needs_no_library_for_tables_or_arrays():
    loaded = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True).stdout.split()
    assert "zmq" in loaded
    assert not {"numpy", "rich", "polars", "pandas"} & set(loaded)
