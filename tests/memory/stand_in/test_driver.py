"""The installed torch_memory_saver binary under our saver for CUDA, over a driver that is a page of C: what it does when tags
sleep and wake, are asked twice, and find no room."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
COMPILER = shutil.which("cc") or shutil.which("gcc")
MIB = 1 << 20


def _binary() -> Path | None:
    found = importlib.util.find_spec("torch_memory_saver")
    if found is None or found.origin is None:
        return None
    return next(iter(sorted(Path(found.origin).parents[1].glob("torch_memory_saver_hook_mode_preload_cu13*.so"))), None)


BINARY = _binary()
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C compiler here: the stand-in driver cannot be built"),
    pytest.mark.skipif(BINARY is None, reason="torch_memory_saver's CUDA 13 binary is not installed"),
]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """A folder with the two libraries that the binary is linked against."""
    folder = tmp_path_factory.mktemp("libraries")
    version = folder / "version"
    version.write_text("libcudart.so.13 { global: *; };\n")
    shared = [COMPILER, "-O1", "-shared", "-fPIC", str(HERE / "driver.c")]
    subprocess.run([*shared, "-DDRIVER", "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1"], check=True)
    runtime = ["-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={version}", f"-L{folder}", "-l:libcuda.so.1"]
    subprocess.run([*shared, *runtime, "-o", folder / "libcudart.so.13"], check=True)
    return folder


@pytest.fixture
def play(libraries):
    """A scene of child.py in a process of its own: (exit code, what it answer)."""

    def run(scene: str, budget: int = 256 * MIB):
        environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries), "STAND_IN_BUDGET": str(budget), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.memory.stand_in.child", scene, str(BINARY)]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, json.loads(done.stdout) if done.returncode == 0 else done.stderr

    return run


def test_tags_leave_the_device_and_come_back_where_they_were(play):
    code, answer = play("plain")
    assert code == 0, answer
    both = {"weights": 64 * MIB, "kv_cache": 128 * MIB}
    assert answer["awake"] == answer["again"] == both and answer["asleep"] == {"weights": 0, "kv_cache": 0}
    assert (answer["free_awake"], answer["free_asleep"], answer["free_again"]) == (64, 256, 64)
    assert answer["value"] == 0  # fresh pages: dropped


def test_a_backup_comes_back_with_its_values(play):
    code, answer = play("backup")
    assert code == 0 and answer["value"] == 7, answer


def test_the_library_itself_ends_the_process_where_ours_does_nothing(play):
    assert play("stock_twice")[0] != 0
    code, answer = play("twice")
    assert code == 0 and answer["free_again"] == 64, answer


def test_the_library_itself_ends_the_process_for_want_of_room_where_ours_raises_and_goes_on(play):
    assert play("stock_no_room")[0] != 0
    code, answer = play("no_room")
    assert code == 0, answer
    assert "kv_cache needs 0.13 GB, 0.10 are free" in answer["error"]
    assert answer["free_refused"] == 256 - 100 - 64 and answer["free_again"] == 64


def test_graphs_without_room_are_an_error_and_not_the_end_of_the_process(play):
    code, answer = play("graphs")
    assert code == 0 and answer == {"error": "cuda_graph needs 0.03 GB, 0.03 are free", "free": 24}, answer
