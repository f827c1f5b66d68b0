"""`verl-mux doctor --gpu`: would the first job on this machine's GPUs fail, and why? What was read of the machine, and a pure
function of it for each check.

Runs on the command line; called by doctor.py; reads nvidia-smi, /proc, packages and limits; starts the dynamic linker; may ask a
hub. Changes nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import re
import resource
import shutil
import subprocess
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from verl_mux.platform.charges import GB
from verl_mux.platform.cuda_packages import (
    FLASH_ATTENTION,
    has_flash_attention,
    hub_has_flash_attention,
    linked,
    saver_library,
    torch_cuda,
    with_torchs_runtime,
)
from verl_mux.platform.host_memory import room

_QUERY = "index,name,memory.total,compute_mode,mig.mode.current,persistence_mode"
_SHM_GB, _OBJECT_STORE_GB = 1, 10  # NCCL's buffers of eight ranks; what recipes/cluster/clusters.py gives a Ray node
_RAYS_OWN = (10002, 19999)
_WARM = "sglang.bench_one_batch"
PORTS = "start each cluster with ports of its own, worker ports 0 (`python recipes/cluster/clusters.py RUN.yaml --print`)"


@dataclass(frozen=True)
class Check:
    """`ok` None: nothing is wrong, but read the advice."""

    name: str
    ok: bool | None
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Machine:
    """What was read.

    gpus: nvidia-smi's table of _QUERY, or its error; "" without it. screen: what it prints by itself. torch: the CUDA version
    torch is built for. flash, hub: whether flash-attn 2, or its substitute from a hub, is to be had. engines: those installed.
    programs: paths of nvcc, ninja and a C++ compiler, where found. linker: the dynamic linker's list of a scheduler of SGLang's;
    None: torch_memory_saver is not installed. built: number of kernels that flashinfer has on this host. raylets: command lines
    of Ray's processes. memlock: bytes, -1 without limit. shm, memory: bytes in all.
    """

    gpus: str
    screen: str
    torch: tuple[int, int] | None
    flash: bool
    hub: bool
    engines: Sequence[str]
    programs: Mapping[str, str | None]
    linker: str | None
    built: int
    raylets: Sequence[str]
    memlock: int
    shm: int
    memory: int


def gpu_checks(machine: Machine, needs: Mapping[str, int], asked: Collection[str]) -> Iterator[Check]:
    """In the order in which a job would meet them. needs: bytes of host memory that the jobs keep on each of their nodes. asked:
    their kinds of attention."""
    rows = [[field.strip() for field in line.split(",")] for line in machine.gpus.splitlines() if line.count(",") == 5]
    yield gpus(rows, machine.gpus)
    if rows:
        yield driver(machine.screen, machine.torch)
        yield compute_mode(rows)
        yield mig(rows)
        yield persistence(rows)
    yield attention(machine.flash, machine.hub, asked)
    if "sglang" in machine.engines:
        yield compiler(machine.programs, machine.built)
        yield kernels(machine.built)
        yield linker(machine.linker, bool(rows))
    yield ray_ports(machine.raylets)
    yield memlock(machine.memlock)
    yield shm(machine.shm)
    yield host_memory(machine.memory, needs)


# ---------------------------------------------------------------- the GPUs; rows: of each the fields of _QUERY


def gpus(rows: list[list[str]], said: str) -> Check:
    if not rows:
        why = f"nvidia-smi says {said.splitlines()[0]!r}" if said else "there is no nvidia-smi"
        what = f"no NVIDIA GPU here ({why}), so driver, compute mode, MIG and persistence are not checked"
        return Check("GPUs", False, what, "run this on a host where nvidia-smi lists GPUs")
    each = []
    for (name, mib), count in Counter((row[1], row[2]) for row in rows).items():
        size = int(mib) << 20 if mib.isdigit() else 0
        of_node = f", {size / GB:.1f} GB each (device_bytes: {count * size} for a node of all {count})" if size else ""
        each.append(f"{count} x {name}{of_node}")
    return Check("GPUs", True, "; ".join(each))


def driver(screen: str, torch: tuple[int, int] | None) -> Check:
    found = re.search(r"CUDA (?:\w+ )?Version\s*:\s*(\d+)\.(\d+)", screen)
    if torch is None:
        return Check("driver", False, "torch is not installed or built without CUDA", "install a torch that is built for CUDA")
    built = f"torch is built for CUDA {torch[0]}.{torch[1]}"
    if found is None:
        return Check("driver", None, f"nvidia-smi does not say its CUDA version, and {built}", "compare them")
    ok = int(found[1]) >= torch[0]  # within a major version older drivers run newer programs
    advice = f"install a driver for CUDA {torch[0]}, or a torch for CUDA {found[1]}"
    return Check("driver", ok, f"for CUDA up to {found[1]}.{found[2]}; {built}", "" if ok else advice)


def compute_mode(rows: list[list[str]]) -> Check:
    wrong = {row[0]: row[3] for row in rows if row[3] not in ("Default", "[N/A]", "N/A")}
    if not wrong:
        return Check("compute mode", True, "processes may share each GPU")
    listed = ", ".join(f"GPU {index} is {mode}" for index, mode in wrong.items())
    return Check("compute mode", False, f"{listed}: two jobs cannot share it", f"sudo nvidia-smi -i {','.join(wrong)} -c DEFAULT")


def mig(rows: list[list[str]]) -> Check:
    split = [row[0] for row in rows if row[4] == "Enabled"]
    if not split:
        return Check("MIG", True, "off")
    return Check("MIG", False, f"GPU {', '.join(split)} is split into instances", f"sudo nvidia-smi -i {','.join(split)} -mig 0")


def persistence(rows: list[list[str]]) -> Check:
    off = [row[0] for row in rows if row[5] == "Disabled"]
    if not off:
        return Check("persistence", True, "on")
    return Check("persistence", None, f"off on GPU {', '.join(off)}: a first context takes seconds more", "sudo nvidia-smi -pm 1")


# ---------------------------------------------------------------- packages and programs


def attention(flash: bool, hub: bool, asked: Collection[str]) -> Check:
    if flash or FLASH_ATTENTION not in asked:
        return Check("attention", True, "flash-attn 2 is installed" if flash else f"the jobs ask for {', '.join(asked)}")
    key = "+actor_rollout_ref.model.override_config.attn_implementation=sdpa"
    what, install = "flash-attn 2, verl's default attention, is not", "install it (`pip install flash-attn --no-build-isolation`)"
    if hub:
        return Check("attention", None, f"{what} installed; transformers fetches one from the hub", install)
    return Check("attention", False, f"{what} here and on no hub that answers", f"{install}, or add {key}")


def compiler(programs: Mapping[str, str | None], built: int) -> Check:
    missing = [name for name, path in programs.items() if path is None]
    if not missing:
        return Check("compiler", True, ", ".join(path for path in programs.values() if path))
    what = f"{' and '.join(missing)} not found, and flashinfer and SGLang compile kernels when an engine starts"
    ways = {"nvcc": "install the CUDA toolkit and set CUDA_HOME", "ninja": "pip install ninja, and have its folder in PATH",
            "c++": "install g++"}  # fmt: skip
    return Check("compiler", None if built else False, what, "; ".join(ways[name] for name in missing))


def kernels(built: int) -> Check:
    if built:
        return Check("kernels", True, f"{built} of flashinfer's are compiled on this host")
    command = f"python -m {_WARM} --model-path MODEL --load-format dummy --attention-backend flashinfer"
    what = "none of flashinfer's is compiled here: the first engine compiles for minutes before it asks for its nodes"
    return Check("kernels", None, what, f"or once, while no job runs: `{command}`")


def linker(listed: str | None, has_gpus: bool) -> Check:
    name = "libcudart"
    if listed is None:
        what, advice = "torch_memory_saver for torch's CUDA is not installed", "pip install torch_memory_saver==0.0.10"
        return Check(name, False, what, advice)
    lost = re.findall(r"^\s*(\S+) => not found", listed, re.MULTILINE)
    if runtime := [library for library in lost if library.startswith("libcudart")]:
        what = f"the linker does not find {runtime[0]} for torch_memory_saver: each engine would end with exit code 127"
        return Check(name, False, what, "install nvidia-cuda-runtime of torch's version, or set LD_LIBRARY_PATH to its folder")
    if lost and has_gpus:
        what = f"the linker does not find {', '.join(lost)}"
        return Check(name, False, what, "install the driver's libraries; in a container: --gpus all")
    found = re.search(r"(libcudart\S+) => (\S+)", listed)
    return Check(name, True, f"{found[1]} is {found[2]}" if found else "nothing is missing")


# ---------------------------------------------------------------- the host


def ray_ports(commands: Sequence[str]) -> Check:
    """Raylets name the ports of their workers and, as `--listen-port`, of their agent; Ray's client servers their own."""

    def numbers(option: str, of: str) -> list[int]:
        return [int(found[1]) for text in commands if of in text and (found := re.search(rf"--{option}=(\d+)", text))]

    blocks = list(zip(numbers("min_worker_port", "raylet"), numbers("max_worker_port", "raylet"), strict=False))
    shared = [max(a[0], b[0]) for a, b in itertools.combinations(blocks, 2) if 0 < max(a[0], b[0]) <= min(a[1], b[1])]
    if shared:
        listed = ", ".join(f"{low}-{high}" for low, high in blocks if high)
        what = f"Ray nodes of this host hand out the same worker ports ({listed}); workers die at random"
        return Check("Ray", False, what, PORTS)
    for what, ports in {"agents": numbers("listen-port", "raylet"), "client servers": numbers("port", "client.server")}.items():
        if twice := [port for port, count in Counter(ports).items() if port and count > 1]:
            return Check("Ray", False, f"two {what} of Ray on this host want port {twice[0]}", PORTS)
    if _RAYS_OWN in blocks:
        return Check("Ray", None, f"a Ray node here hands out Ray's own worker ports {_RAYS_OWN[0]}-{_RAYS_OWN[1]}", PORTS)
    found = f"{len(blocks)} Ray nodes on this host, no port twice" if blocks else "no Ray node on this host"
    return Check("Ray", True, found)


def memlock(limit: int) -> Check:
    if limit < 0:
        return Check("memlock", True, "no limit")
    what = f"{limit / GB:.2f} GB may be locked: InfiniBand and mux.sync.transport=nixl cannot register more"
    return Check("memlock", None, what, "ulimit -l unlimited before `ray start`; in a container: --ulimit memlock=-1")


def shm(size: int) -> Check:
    if size >= (_SHM_GB + _OBJECT_STORE_GB) * GB:
        return Check("/dev/shm", True, f"{size / GB:.1f} GB")
    too_little = size < _SHM_GB * GB
    what = "too little for NCCL and Ray" if too_little else "Ray puts its objects on a disk where its object store is larger"
    advice = f"enlarge it, in a container by --shm-size, to Ray's --object-store-memory and {_SHM_GB} GB"
    return Check("/dev/shm", False if too_little else None, f"{size / GB:.1f} GB: {what}", advice)


def host_memory(size: int, needs: Mapping[str, int]) -> Check:
    """The states of sleeping jobs lie in pinned memory, which is not swapped."""
    here = f"this machine has {size / GB:.0f} GB"
    if not needs:
        return Check("host memory", True, f"{here}; --job FILE compares it with what a job's states take there")
    what = f"{', '.join(f'{node} {need / GB:.0f} GB' for node, need in needs.items())}; {here}"
    if max(needs.values()) > size:
        return Check("host memory", False, what, "fewer jobs on a node, more training GPUs, or hosts with more memory")
    if sum(needs.values()) > size:
        return Check("host memory", None, what, "enough for each node, not for all of them on this host")
    return Check("host memory", True, what)


# ---------------------------------------------------------------- reading


def read_machine(engines: Sequence[str]) -> Machine:
    """engines: those installed."""
    library = saver_library()
    flash = has_flash_attention()
    return Machine(
        gpus=_said(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]),
        screen=_said(["nvidia-smi"]),
        torch=torch_cuda(),
        flash=flash,
        hub=not flash and hub_has_flash_attention(),
        engines=engines,
        programs={"nvcc": _nvcc(), "ninja": shutil.which("ninja"), "c++": shutil.which(os.environ.get("CXX", "c++"))},
        # As an engine's server would have it.
        linker=linked(library, {**os.environ, **with_torchs_runtime(os.environ)}) if library else None,
        built=_built(),
        raylets=_raylets(),
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        shm=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
        memory=room().total,
    )


def _said(command: list[str]) -> str:
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False).stdout


def _nvcc() -> str | None:
    """Where flashinfer looks for it."""
    if home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return shutil.which("nvcc", path=f"{home}/bin")
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def _built() -> int:
    package = importlib.util.find_spec("flashinfer_jit_cache")
    home = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", Path.home())) / ".cache" / "flashinfer"
    places = [home, *map(Path, (package.submodule_search_locations if package else None) or ())]
    return sum(1 for place in places for _ in place.rglob("*.so"))


def _raylets() -> list[str]:
    """Of this machine's network, not of containers in others."""
    found, here = [], os.readlink("/proc/self/ns/net")
    for process in psutil.process_iter(["pid", "name", "cmdline"]):
        text = " ".join(process.info["cmdline"] or ())
        if process.info["name"] != "raylet" and "ray.util.client.server" not in text:
            continue
        with contextlib.suppress(OSError):  # ended, or another user's
            if os.readlink(f"/proc/{process.info['pid']}/ns/net") != here:
                continue
        found.append(text)
    return found
