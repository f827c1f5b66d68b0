"""`python -m tests.memory.stand_in.child SCENE LIBRARY`: a scene with the torch_memory_saver binary over the stand-in driver.

Our saver adapter for CUDA stands over the binary as it does over SGLang's adapter; torch is not imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
from collections.abc import Iterator

from verl_mux.memory.tags import Metered, NoRoom

MIB = 1 << 20


class Library:
    """torch_memory_saver's words over its binary, as SGLang's adapter gives them."""

    def __init__(self, path: str) -> None:
        self.c = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        self.c.tms_set_current_tag.argtypes = [ctypes.c_char_p]
        self.c.tms_set_interesting_region.argtypes = self.c.tms_set_enable_cpu_backup.argtypes = [ctypes.c_bool]
        self.c.tms_pause.argtypes = self.c.tms_resume.argtypes = [ctypes.c_char_p]
        self.c.cudaMalloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]
        self.reserved = 0

    @contextlib.contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        self.c.tms_set_current_tag(tag.encode())
        self.c.tms_set_enable_cpu_backup(enable_cpu_backup)
        self.c.tms_set_interesting_region(True)
        yield
        self.c.tms_set_interesting_region(False)

    def cuda_graph(self, tag: str) -> contextlib.AbstractContextManager[None]:
        return self.region(tag)

    def pause(self, tag: str) -> None:
        self.c.tms_pause(tag.encode())

    def resume(self, tag: str) -> None:
        self.c.tms_resume(tag.encode())

    def malloc(self, size: int) -> int:
        at = ctypes.c_void_p()
        assert self.c.cudaMalloc(ctypes.byref(at), size) == 0
        self.reserved += size
        return at.value or 0


class Device:
    """The driver's own count, and what was allocated, asked for as of torch.cuda."""

    def __init__(self, runtime: ctypes.CDLL, library: Library) -> None:
        self._runtime, self._library = runtime, library

    def memory_reserved(self) -> int:
        return self._library.reserved

    def mem_get_info(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def synchronize(self) -> None:
        self._runtime.cudaDeviceSynchronize()

    def ipc_collect(self) -> None:
        return None

    empty_cache = ipc_collect


def scene(name: str, path: str) -> dict:
    library, measured = Library(path), {}
    device, reported = Device(ctypes.CDLL("libcudart.so.13"), library), {}
    saver = Metered(library, device, lambda tag, mapped: reported.__setitem__(tag, mapped))
    with saver.region("weights", enable_cpu_backup=name == "backup"):
        weights = library.malloc(64 * MIB)
    with saver.region("kv_cache"):
        cache = library.malloc(128 * MIB)
    if name == "graphs":
        return graphs(saver, library, device)
    ctypes.memset(weights, 7, 64 * MIB)
    ctypes.memset(cache, 8, 128 * MIB)
    measured["awake"], measured["free_awake"] = dict(reported), device.mem_get_info()[0] // MIB
    if name == "stock_twice":
        library.pause("weights")
        library.pause("weights")  # ends the process
    saver.pause("kv_cache")
    saver.pause("weights")
    measured["asleep"], measured["free_asleep"] = dict(reported), device.mem_get_info()[0] // MIB
    if name == "twice":
        saver.pause("weights")
        saver.pause("kv_cache")
    if name in ("no_room", "stock_no_room"):
        with library.region("another"):
            other = library.malloc(100 * MIB)
        if name == "stock_no_room":
            library.resume("kv_cache")  # ends the process
        saver.resume("weights")
        try:
            saver.resume("kv_cache")
        except NoRoom as error:
            measured["error"] = str(error)
        measured["free_refused"] = device.mem_get_info()[0] // MIB
        library.c.cudaFree.argtypes = [ctypes.c_void_p]
        library.c.cudaFree(other)
    if name == "plain":
        for _ in range(50):
            for tag in ("weights", "kv_cache"):
                saver.resume(tag)
            for tag in ("kv_cache", "weights"):
                saver.pause(tag)
    saver.resume("weights")
    saver.resume("kv_cache")
    if name == "twice":
        saver.resume("weights")
    measured["again"], measured["free_again"] = dict(reported), device.mem_get_info()[0] // MIB
    measured["value"] = ctypes.c_ubyte.from_address(weights + 5).value
    ctypes.memset(cache, 9, 128 * MIB)  # at the address it had
    return measured


def graphs(saver: Metered, library: Library, device: Device) -> dict:
    """Others take the room of captured graphs as they sleep."""
    with saver.cuda_graph(tag="cuda_graph"):
        library.malloc(32 * MIB)
    saver.pause("cuda_graph")
    with library.region("another"):
        library.malloc(40 * MIB)
    try:
        saver.resume("cuda_graph")
    except NoRoom as error:
        return {"error": str(error), "free": device.mem_get_info()[0] // MIB}
    return {}


if __name__ == "__main__":
    print(json.dumps(scene(sys.argv[1], sys.argv[2])), flush=True)
