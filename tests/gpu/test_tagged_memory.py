"""torch_memory_saver on a CUDA device, as our servers use it: by tag, bytes really given back, addresses kept."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

_SCRIPT = """
import json, torch
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
from verl_mux.rollout.engine.sglang.memory_saver import create_adapter
adapter = create_adapter(TorchMemorySaverAdapter.create, enable=True)
MIB = 2**20
free = lambda: torch.cuda.mem_get_info()[0]
with adapter.region("weights"):
    weights = torch.full((256 * MIB,), 1, dtype=torch.uint8, device="cuda")
with adapter.region("kv_cache"):
    cache = torch.full((512 * MIB,), 2, dtype=torch.uint8, device="cuda")
pointer, awake = weights.data_ptr(), free()
adapter.pause("kv_cache"); kv = free() - awake
adapter.pause("weights"); both = free() - awake
adapter.resume("weights"); weights.fill_(3)
adapter.resume("kv_cache")
torch.cuda.synchronize()
same = weights.data_ptr() == pointer
print(json.dumps({"kv": kv, "both": both, "same_address": same, "value": int(weights[-1]), "left": free() - awake}))
"""


@pytest.fixture(scope="module")
def measured():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    import torch_memory_saver

    with torch_memory_saver.configure_subprocess():
        result = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_pausing_a_tag_gives_that_tags_bytes_back(measured):
    assert measured["kv"] == 512 * 2**20
    assert measured["both"] == 768 * 2**20


def test_resumed_memory_has_its_old_address_and_can_be_written(measured):
    assert measured["same_address"]
    assert measured["value"] == 3
    assert measured["left"] == 0
