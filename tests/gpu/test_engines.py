"""Real SGLang engines on CUDA: what they keep, whether they grow, what a sync fills, what they do without room; and
torch_memory_saver as our servers use it. Device memory is as NVML shows it: by process, or of the device where it shows none of
ours."""

import json
import subprocess
import sys

import pytest

from tests.gpu import record, scenes, states
from tests.gpu.engines import opened
from verl_mux.memory.tags import KV_CACHE

pytestmark = pytest.mark.gpu
SHARE, ROUNDS = 0.3, 50


@pytest.fixture(scope="module")
def bed(gpus, tmp_path_factory):
    pytest.importorskip("sglang")
    yield from opened("sglang", tmp_path_factory.mktemp("engines"))


@pytest.fixture
def engine(bed):
    first = len(bed.started)
    yield bed.engine
    for started in bed.started[first:]:
        started.end()


def test_asleep_an_engine_keeps_what_is_charged_and_no_more(bed, engine, ranks):
    assert scenes.kept_asleep(bed, engine("kept", SHARE, ranks=ranks), bed.limit(ranks)) == []


def test_no_process_grows_in_fifty_rounds(bed, engine, ranks):
    assert scenes.growth(bed, engine("steady", SHARE, ranks=ranks), ROUNDS) == []


def test_a_sync_brings_everything_back_and_the_right_values(bed, engine, ranks):
    fresh = engine("fresh", SHARE, ranks=ranks)
    tokens = fresh.tokens()
    fresh.end()
    assert scenes.filled_by_the_sync(engine("synced", SHARE, ranks=ranks), tokens) == []


def test_an_engine_that_joins_while_another_generates_has_the_cache_that_it_would_have_alone(bed, engine, ranks):
    """Of two GPUs one is fuller."""
    alone = engine("alone", SHARE, ranks=ranks)
    size = alone.tags[KV_CACHE]
    alone.end()
    assert scenes.as_if_alone(bed, size, bed.limit(ranks), SHARE, ranks=ranks) == []


def test_an_engine_that_starts_beside_another_process_books_none_of_its_memory(bed, engine):
    assert scenes.sized_beside(bed, engine("alone", SHARE), SHARE) == []


def test_a_wake_without_room_is_an_error_and_hurts_nobody(bed, engine):
    sleeper = engine("sleeper", 0.6)
    sleeper.sleep()
    assert scenes.no_room(engine("awake", 0.7), sleeper) == []


@pytest.mark.parametrize("phase", scenes.PHASES)
def test_a_dead_jobs_node_is_granted_when_no_process_of_it_holds_memory(bed, phase):
    assert scenes.killed_in(bed, phase) == []


@pytest.fixture
def one_gpu(gpus, tmp_path):
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_host_copy_is_whole_when_a_sleep_returns_and_the_device_is_free(one_gpu, role):
    assert scenes.copied_when_told(*states.made(role, "cuda"), workspaces=256 << 20) == []


_SCRIPT = """
import json, time, torch
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
from verl_mux.rollout.engine.sglang.scheduler_memory import create_adapter
adapter = create_adapter(TorchMemorySaverAdapter.create, enable=True)
MIB = 2**20
free = lambda: torch.cuda.mem_get_info()[0]
with adapter.region("weights"):
    weights = torch.full((256 * MIB,), 1, dtype=torch.uint8, device="cuda")
with adapter.region("kv_cache"):
    cache = torch.full((512 * MIB,), 2, dtype=torch.uint8, device="cuda")
pointer, awake = weights.data_ptr(), free()
began = time.perf_counter()
adapter.pause("kv_cache"); kv = free() - awake
adapter.pause("weights"); both = free() - awake
paused = time.perf_counter()
adapter.resume("weights"); weights.fill_(3)
adapter.resume("kv_cache")
torch.cuda.synchronize()
took = {"pause_s": paused - began, "resume_s": time.perf_counter() - paused}
same = weights.data_ptr() == pointer
print(json.dumps({"kv": kv, "both": both, "same_address": same, "value": int(weights[-1]), "left": free() - awake, **took}))
"""


@pytest.fixture(scope="module")
def measured(gpus):
    import torch_memory_saver

    with torch_memory_saver.configure_subprocess():
        result = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout.splitlines()[-1])
    record.note(**found)
    return found


def test_pausing_a_tag_gives_that_tags_bytes_back(measured):
    assert measured["kv"] == 512 * 2**20
    assert measured["both"] == 768 * 2**20


def test_resumed_memory_has_its_old_address_and_can_be_written(measured):
    assert measured["same_address"]
    assert measured["value"] == 3
    assert measured["left"] == 0
