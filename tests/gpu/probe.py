"""`python tests/gpu/probe.py [--cpu] [NAME ...]`: what only a GPU can say, in the order in which one wants to know it.

Needs torch, torch_memory_saver, msgspec, numpy, psutil, typer, xxhash and this checkout: no verl and no engine. Prints a JSON
line a probe: `right`, whether what it checks holds, its figures (names end in their unit), or its error. Each runs within a limit
of seconds in a process of its own, forked from this one, which has imported torch and not started CUDA. --cpu: with tiny sizes,
in host memory. Exit code 1: one of them is not right.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
CPU = "--cpu" in sys.argv
DEVICE, MIB, ROUNDS = "cpu" if CPU else "cuda", 1 << 20, 5

# Else torch starts CUDA to see whether it is there, and no process that is forked later could.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import torch  # noqa: E402

if CPU:  # once for all that are forked; it may look for CUDA
    import torch._dynamo
    import torch.distributed.fsdp

from bench.sync.host import of_a_host, shapes  # noqa: E402
from verl_mux.memory import arena  # noqa: E402
from verl_mux.memory.tags import Metered, NoRoom  # noqa: E402


def sized(gpu: int, cpu: int) -> int:
    return cpu if CPU else gpu


def free() -> int:
    """Bytes of the device; on a CPU nothing is known of it."""
    return 0 if CPU else torch.cuda.mem_get_info()[0]


@contextlib.contextmanager
def timed(into: dict[str, Any], name: str) -> Iterator[None]:
    synchronize()
    began = time.perf_counter()
    yield
    synchronize()
    into.setdefault(f"{name}_s", []).append(round(time.perf_counter() - began, 6))


def synchronize() -> None:
    if not CPU:
        torch.cuda.synchronize()


def saver(tags: dict[str, int]) -> Any:
    """torch_memory_saver under our meter, as in SGLang's schedulers; on a CPU the saver that stands for it there."""
    if CPU:
        from verl_mux_cpu.cpu_engine import SavingAdapter

        return SavingAdapter(tags.__setitem__)
    from torch_memory_saver import torch_memory_saver

    return Metered(torch_memory_saver, torch.cuda, tags.__setitem__)


# ---------------------------------------------------------------- memory that sleeps


def segments() -> dict[str, Any]:
    """A tag of many segments, as a model's: how fast it moves, and its size while another process makes a context (A1)."""
    tags: dict[str, int] = {}
    device, count, each = saver(tags), sized(256, 4), sized(32 * MIB, MIB)
    begins = "" if CPU else "import torch; torch.zeros(1, device='cuda'); "
    command = [sys.executable, "-c", f"{begins}print('here', flush=True); input()"]
    around = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    found: dict[str, Any] = {"segments": count, "wanted_bytes": count * each}
    torch.zeros(1, device=DEVICE)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=around) as other:
        before = free()
        with device.region("weights"):
            held = [torch.full((each,), at % 251, dtype=torch.uint8, device=DEVICE) for at in range(count)]
            assert other.stdout and other.stdout.readline() == "here\n"
        found |= {"tag_bytes": tags["weights"], "taken_of_the_device_bytes": before - free()}
        places = [it.data_ptr() for it in held]
        for _ in range(ROUNDS):
            with timed(found, "pause"):
                device.pause("weights")
            found["asleep_bytes"] = tags["weights"]
            with timed(found, "resume"):
                device.resume("weights")
        other.communicate("\n")
    found["pause_ms_a_segment"] = median(found["pause_s"]) * 1000 / count
    found["resume_ms_a_segment"] = median(found["resume_s"]) * 1000 / count
    same = [it.data_ptr() for it in held] == places and found["asleep_bytes"] == 0
    return found | {"right": same and abs(found["tag_bytes"] - count * each) <= 0.02 * count * each}


def libraries() -> dict[str, Any]:
    """What cuBLAS and modules take within a region is not the tag's, and a small model sleeps all the same (A2)."""
    tags: dict[str, int] = {}
    device = saver(tags)
    torch.zeros(1, device=DEVICE)
    before = free()
    with device.region("weights"):
        weight = torch.ones(sized(3072, 64), sized(3072, 64), dtype=torch.bfloat16, device=DEVICE)
        torch.nn.functional.gelu(weight @ weight).float().softmax(-1).sum().item()
    found = {"tag_bytes": tags["weights"], "taken_of_the_device_bytes": before - free(), "weight_bytes": weight.nbytes}
    device.pause("weights")
    return found | {"asleep_bytes": tags["weights"], "right": tags["weights"] == 0}


def graphs() -> dict[str, Any]:
    """A graph whose memory slept gives the same again (A11); one that was captured without the saver stays (A4)."""
    if CPU:
        return {"right": True, "left_out": "a CPU has no graphs"}
    tags: dict[str, int] = {}
    device, x = saver(tags), torch.randn(2048, 4096, device=DEVICE)
    weight = torch.randn(4096, 4096, device=DEVICE) / 64

    def layers() -> torch.Tensor:
        y = x
        for _ in range(8):
            y = torch.relu(y @ weight)
        return y

    synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        layers()
    synchronize()
    graph, plain = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with device.cuda_graph(tag="cuda_graph", cuda_graph=graph):
        out = layers()
    graph.replay()
    expected, awake = out.clone(), free()
    device.pause("cuda_graph")
    found: dict[str, Any] = {"tag_bytes": tags.get("cuda_graph", 0), "left_the_device_bytes": free() - awake}
    device.resume("cuda_graph")
    out.zero_()
    graph.replay()
    same = torch.equal(out, expected)
    before = free()
    with torch.cuda.graph(plain):
        again = layers()
    plain.replay()
    found["of_a_plain_graph_bytes"] = before - free()
    device.pause("cuda_graph")
    found["a_plain_graph_is_the_same_while_the_other_sleeps"] = torch.equal(again, expected)
    return found | {"right": same}


def no_room() -> dict[str, Any]:
    """A wake without room is an error and no end of the process; with room it works."""
    if CPU:
        from verl_mux_cpu import device_ledger as ledger

        with tempfile.TemporaryDirectory() as folder:
            os.environ |= {ledger.DIRECTORY_VARIABLE: folder, ledger.BUDGET_VARIABLE: str(2 * MIB), ledger.NODE_VARIABLE: "n0"}
            return _refused(MIB, lambda: ledger.charge({"block": 2 * MIB}), lambda: ledger.charge({"block": 0}))
    torch.zeros(1, device=DEVICE)
    size, other = int(0.6 * free()) // MIB * MIB, list[torch.Tensor]()

    def give() -> None:
        other.clear()
        torch.cuda.empty_cache()

    return _refused(size, lambda: other.append(torch.empty(size, dtype=torch.uint8, device=DEVICE)), give)


def _refused(size: int, take: Callable[[], None], give: Callable[[], None]) -> dict[str, Any]:
    device, refused = saver({}), ""
    with device.region("kv_cache"):
        held = torch.ones(size, dtype=torch.uint8, device=DEVICE)
    device.pause("kv_cache")
    take()
    try:
        device.resume("kv_cache")
    except (NoRoom, torch.OutOfMemoryError) as error:
        refused = str(error)
    give()
    device.resume("kv_cache")
    held.fill_(7)
    return {"bytes": size, "refused": refused, "right": bool(refused) and int(held[-1]) == 7}


# ---------------------------------------------------------------- a trainer's states


def fsdp_states() -> Any:
    """Ours, without verl, of which it asks for the device."""
    cpu = SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None)
    device = ModuleType("verl.utils.device")
    device.get_device_name, device.get_torch_device = lambda: DEVICE, lambda: cpu if CPU else torch.cuda  # type: ignore[attr-defined]
    fsdp = ModuleType("verl.workers.engine.fsdp")
    fsdp.transformer_impl = SimpleNamespace()  # type: ignore[attr-defined]
    for name in ("verl", "verl.utils", "verl.workers", "verl.workers.engine"):
        sys.modules[name] = ModuleType(name)
    sys.modules |= {"verl.utils.device": device, "verl.workers.engine.fsdp": fsdp}
    # The package's own modules of this room import verl's trainer.
    sys.modules["verl_mux.trainer"] = package = ModuleType("verl_mux.trainer")
    package.__path__ = [str(ROOT / "verl_mux" / "trainer")]
    from verl_mux.trainer import fsdp_states as ours

    return ours


def one_rank(rank: int = 0, ranks: int = 1) -> None:
    """Of a group in which no other process is."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)


def states() -> dict[str, Any]:
    """An 8th of a 7B model with Adam leaves and comes back: seconds, the host's bytes, what stays, every bit (A3)."""
    from torch.distributed.fsdp import fully_shard

    from verl_mux.platform.host_memory import process_bytes

    ours = fsdp_states()
    one_rank()
    matrices = [shape for shape in shapes(sized(1_900_000_000, 200_000)).values() if len(shape) == 2]
    module = torch.nn.Sequential(*(torch.nn.Linear(i, o, bias=False, device=DEVICE) for o, i in matrices))
    for layer in module:
        fully_shard(layer)
    fully_shard(module)
    optimizer = torch.optim.AdamW(module.parameters())
    for param in module.parameters():
        param.grad = torch.full_like(param, 1e-3)
    optimizer.step()
    optimizer.zero_grad()

    def parts() -> list[torch.Tensor]:
        return [it.part.detach() for it in (*ours.of_model(module), *ours.of_optimizer(optimizer))]

    bits = [it.cpu().clone() for it in parts()]
    size, before = sum(it.nbytes for it in bits), sum(process_bytes().values())
    found: dict[str, Any] = {"states_bytes": size}
    same = True
    for _ in range(3):
        with timed(found, "offload"):
            ours.offload_model(module)
            ours.offload_optimizer(optimizer)
        found["left_bytes"] = 0 if CPU else torch.cuda.memory_allocated()
        same = same and all(torch.equal(a, b) for a, b in zip(bits, parts(), strict=True))
        found.setdefault("host_bytes", sum(process_bytes().values()) - before)
        with timed(found, "load"):
            module.to(DEVICE)
            for kept in optimizer.state.values():
                kept.update({name: it.to(DEVICE, non_blocking=True) for name, it in kept.items()})
    found |= {f"{name}_gb_per_s": size / found[f"{name}_s"][-1] / 1e9 for name in ("offload", "load")}
    exact = CPU or abs(found["host_bytes"] - size) < 0.05 * size
    return found | {"right": same and exact and found["left_bytes"] <= 0.05 * size}


def uneven() -> dict[str, Any]:
    """The shard of a rank with fewer rows than others, which FSDP pads, is on the host what it was on the device (A6)."""
    from torch.distributed.fsdp import fully_shard

    ours, wrong, rows = fsdp_states(), 0, sized(3583, 7)
    one_rank(rank=2, ranks=3)
    torch.manual_seed(0)
    module = torch.nn.Linear(sized(4096, 4), rows, bias=False, device=DEVICE)
    fully_shard(module)
    expected = ours.local(module.weight.detach()).cpu().clone()
    for _ in range(20):
        module.to(DEVICE)
        ours.offload_model(module)
        wrong += not torch.equal(ours.local(module.weight.detach()), expected)
    return {"rows": rows, "rounds": 20, "wrong": wrong, "right": not wrong and expected.shape[0] < rows / 3}


# ---------------------------------------------------------------- a sync


def region() -> dict[str, Any]:
    """A host's memory for the weights of a 7B model: made, and pinned by one process and by four at once (A10)."""
    from verl_mux.sync.layout import Region

    found: dict[str, Any] = {"bytes": sized(15_200_000_000, 32 * MIB)}
    with timed(found, "make") if CPU else _untimed(found, "make"):
        held = Region.made(found["bytes"])
    for count in (1, 4):
        pipes, started = [], []
        for _ in range(count):
            ours, theirs = FORK.Pipe()
            started.append(FORK.Process(target=_pins, args=(os.dup(held.fd), held.nbytes, theirs)))
            started[-1].start()
            theirs.close()
            pipes.append(ours)
        found[f"pin_by_{count}_s"] = max(it.recv() for it in pipes)
        for process in started:
            process.join()
    return found | {"right": True}


@contextlib.contextmanager
def _untimed(into: dict[str, Any], name: str) -> Iterator[None]:
    """As `timed`, before CUDA has started: processes are forked later."""
    began = time.perf_counter()
    yield
    into[f"{name}_s"] = [time.perf_counter() - began]


def _pins(fd: int, nbytes: int, pipe: Any) -> None:
    from verl_mux.sync.layout import Region

    mapped = torch.frombuffer(Region(fd, nbytes).view, dtype=torch.uint8)
    torch.zeros(1, device=DEVICE)
    began = time.perf_counter()
    mapped[::4096].sum() if CPU else arena.pin(mapped.data_ptr(), nbytes, "weights")
    pipe.send(time.perf_counter() - began)


def columns() -> dict[str, Any]:
    """A rank's part of a matrix out of pinned memory: by rows, by columns, and by columns through the device (P3)."""
    shape, found = (sized(3584, 70), sized(18944, 40)), dict[str, Any]()
    full = torch.randn(shape).bfloat16()
    if not CPU:
        full = full.pin_memory()
    half = (shape[0] // 2, shape[1] // 2)
    rows = torch.empty((half[0], shape[1]), dtype=torch.bfloat16, device=DEVICE)
    part = torch.empty((shape[0], half[1]), dtype=torch.bfloat16, device=DEVICE)
    ways: dict[str, Callable[[], Any]] = {
        "rows": lambda: rows.copy_(full.narrow(0, 0, half[0])),
        "columns": lambda: part.copy_(full.narrow(1, half[1], half[1])),
        "columns_by_device": lambda: part.copy_(full.to(DEVICE, non_blocking=True).narrow(1, half[1], half[1])),
    }
    same = True
    for name, copy in ways.items():
        for _ in range(ROUNDS):
            with timed(found, name):
                copy()
        found[f"{name}_gb_per_s"] = part.nbytes / median(found.pop(f"{name}_s")) / 1e9
        same = same and (name == "rows" or torch.equal(part.cpu(), full[:, half[1] :]))
    return found | {"right": same}


def sync() -> dict[str, Any]:
    """`verl-mux bench sync --host`, of as much as the host has memory for: cast, sockets, digests, copies (P1, P2)."""
    found = of_a_host(sized(4 << 30, 2 * MIB))
    return found | {"right": found["bit_equal"]}


def contents() -> dict[str, Any]:
    """What a wake costs beside mapping: marks in every parameter, or the copy of level 1, whose memory is pinned once (P6)."""
    from verl_mux.memory.contents import Contents

    made = [torch.randn(*shape, device=DEVICE).bfloat16() for shape in shapes(sized(7_600_000_000, 100_000)).values()]
    model, found = torch.nn.ParameterList(made), dict[str, Any]()
    kept, lacked = Contents(model), []
    for level in (2, 2, 1, 1):
        with timed(found, f"leave_level_{level}"):
            kept.left(level)
        with timed(found, f"come_back_level_{level}"):
            kept.came_back()
        lacked.append(kept.lacks() is not None)
        if level == 2:
            with torch.no_grad():
                for param, values in zip(model, made, strict=True):
                    param.copy_(values.nan_to_num(1.0))
        with timed(found, f"look_level_{level}"):
            left = kept.lacks()
        lacked.append(left is not None)
        kept.settled()
    found |= {"parameters": len(made), "bytes": sum(it.nbytes for it in made)}
    return found | {"right": lacked == [True, False, True, False, False, False, False, False]}


# Name -> the probe, and how many seconds it may take.
PROBES: dict[str, tuple[Callable[[], dict[str, Any]], int]] = {
    "segments": (segments, 90), "libraries": (libraries, 60), "graphs": (graphs, 60), "no_room": (no_room, 60),
    "states": (states, 150), "uneven": (uneven, 60), "region": (region, 120), "columns": (columns, 60), "sync": (sync, 180),
    "contents": (contents, 120),
}  # fmt: skip
FORK = multiprocessing.get_context("fork")


def _child(name: str, pipe: Any) -> None:
    os.setsid()  # what it starts ends with it
    try:
        pipe.send(PROBES[name][0]())
    except Exception as error:
        pipe.send({"right": False, "error": f"{type(error).__name__}: {error}"})


def played(name: str) -> dict[str, Any]:
    ours, theirs = FORK.Pipe()
    process, limit, began = FORK.Process(target=_child, args=(name, theirs)), PROBES[name][1], time.perf_counter()
    process.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(limit) else {"right": False, "error": f"not done within {limit} s"}
    except EOFError:
        process.join()
        found = {"right": False, "error": f"its process ended with exit code {process.exitcode}"}
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    return {"probe": name, "seconds": round(time.perf_counter() - began, 3), **found}


def main() -> int:
    """The exit code."""
    if not CPU and "torch_memory_saver" not in os.environ.get("LD_PRELOAD", ""):
        import torch_memory_saver

        from verl_mux.platform.cuda_packages import with_torchs_runtime

        with torch_memory_saver.configure_subprocess():
            os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **with_torchs_runtime(os.environ)})
    wrong = 0
    for name in [it for it in sys.argv[1:] if it != "--cpu"] or PROBES:
        found = played(name)
        print(json.dumps(found), flush=True)
        wrong += not found["right"]
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
