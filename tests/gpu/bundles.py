"""`python -m tests.gpu.bundles FOLDER`: what a GPU machine without a package index lacks beside torch (Python 3.12, x86-64).

Writes FOLDER/A1.tar.xz and so on, of at most 60 MB each, to be carried one by one: A for probe.py, B the engine, C verl and what
else these need, D Ray. Versions are those of requirements/lock.txt. A file has packages, or parts of one, each as a .tar.xz, one
after the other; `UNPACK` unpacks any number of them. Our code comes with the checkout: of our packages only what names their
entry points is there.
"""

from __future__ import annotations

import importlib.metadata
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 60 * 10**6
UNPACK = "mkdir -p /tmp/site && cat {}/*.tar.xz | tar -xJi -C /tmp/site && export PYTHONPATH=$PWD:/tmp/site"
# SGLang has wheels for no older C library.
PLATFORM = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_35")
# What torch brings.
OF_TORCH = re.compile(
    r"torch|torchaudio|torchvision|triton|cuda-(bindings|core|pathfinder|python|toolkit)"
    r"|nvidia-(cublas|cuda-\w+|cudnn-cu13|cufft|cufile|curand|cusolver|cusparse|cusparselt-cu13|nccl-cu13|nvjitlink|nvshmem-cu13|nvtx)"
)
# Of `make lint` alone; for GPUs after Hopper; and large ones that no engine or job of tests/gpu imports.
LEFT_OUT = """
grimp import-linter mypy ruff vulture
flashinfer-cubin nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base
anthropic fonttools ipython jedi kiwisolver llguidance lxml matplotlib modelscope modelscope-hub outlines outlines-core polars
polars-runtime-32 py-spy tensorboard tensorboard-data-server tilelang timm tokenspeed-triton virtualenv wandb z3-solver
"""
# A gigabyte of FlashAttention 3, which nothing imports where flashinfer is the attention backend.
FILES_LEFT_OUT = {"sgl_kernel/flash_ops.abi3.so"}
OWN = ("verl-mux", "verl-mux-cpu")
# C has what stands in no row.
BUNDLES = {
    "A": "msgspec numpy psutil torch-memory-saver verl-mux verl-mux-cpu xxhash",
    "B": "apache-tvm-ffi flashinfer-python huggingface-hub safetensors sgl-deep-gemm sglang sglang-kernel tokenizers "
    "transformers xgrammar",
    "D": "ray",
}  # fmt: skip
OF = {name: letter for letter, names in BUNDLES.items() for name in names.split()}


def parts(files: Sequence[tuple[str, int]], pack: Callable[[list[str]], bytes], limit: int) -> list[bytes]:
    """`files`, with their bytes, packed: all at once, or halved until each part is within `limit` bytes.

    Raises:
        ValueError: one file alone is larger.
    """
    packed = pack([path for path, _ in files])
    if len(packed) <= limit:
        return [packed]
    if len(files) == 1:
        raise ValueError(f"{files[0][0]} takes {len(packed)} bytes packed, at most {limit} are allowed: add it to FILES_LEFT_OUT")
    half, at, gone = sum(size for _, size in files) / 2, 0, 0
    while at < len(files) - 1 and gone < half:
        gone += files[at][1]
        at += 1
    return [*parts(files[:at], pack, limit), *parts(files[at:], pack, limit)]


def filled(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in boxes of at most `limit` bytes each: the largest first, each into the first box with room."""
    boxes: list[list[str]] = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        box = next((box for box in boxes if sum(sizes[it] for it in box) + sizes[name] <= limit), None)
        if box is None:
            boxes.append(box := [])
        box.append(name)
    return boxes


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted(lock: Iterable[str]) -> list[str]:
    names = {line: line.partition("==")[0] for line in lock}
    return [line for line, name in names.items() if not OF_TORCH.fullmatch(name) and name not in LEFT_OUT.split()]


def install(site: Path) -> None:
    """The locked packages, for the GPU machine."""
    listed = site.with_suffix(".txt")
    listed.write_text("\n".join(wanted((ROOT / "requirements/lock.txt").read_text().splitlines())))
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--no-deps", "--target", str(site), *PLATFORM]
    subprocess.run([*uv, "-r", str(listed)], check=True)
    listed.unlink()


def name_own(site: Path) -> None:
    """The entry points of our own packages."""
    for name in OWN:
        about = importlib.metadata.distribution(name)
        folder = site / f"{name.replace('-', '_')}-{about.version}.dist-info"
        folder.mkdir()
        for file in ("METADATA", "entry_points.txt"):
            (folder / file).write_text(about.read_text(file) or "")
        names = (f"{folder.name}/{file},,\n" for file in ("METADATA", "entry_points.txt", "RECORD"))
        (folder / "RECORD").write_text("".join(names))


def packages(site: Path) -> dict[str, list[tuple[str, int]]]:
    """By name, each package's files with their bytes."""
    found = {}
    for package in importlib.metadata.distributions(path=[str(site)]):
        files = [str(file) for file in package.files or [] if str(file) not in FILES_LEFT_OUT]
        found[canonical(package.name)] = [(it, (site / it).stat().st_size) for it in files if (site / it).is_file()]
    return found


def packed(site: Path, files: Iterable[str]) -> bytes:
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode="w:xz") as tar:
        for file in files:
            tar.add(site / file, arcname=file)
    return into.getvalue()


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    site = folder / "site"
    install(site)
    name_own(site)
    found = packages(site)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        cut = threads.map(lambda name: parts(found[name], lambda files: packed(site, files), LIMIT), found)
        by_name = dict(zip(found, cut, strict=True))
    pieces = {(name, at): piece for name, its in by_name.items() for at, piece in enumerate(its, 1)}
    for letter in "ABCD":
        sizes = {key: len(piece) for key, piece in pieces.items() if OF.get(key[0], "C") == letter}
        for number, box in enumerate(filled(sizes, LIMIT), 1):
            path = folder / f"{letter}{number}.tar.xz"
            path.write_bytes(b"".join(pieces[key] for key in box))
            names = " ".join(name if len(by_name[name]) == 1 else f"{name}:{at}/{len(by_name[name])}" for name, at in box)
            print(f"{path.stat().st_size / 1e6:6.1f} MB  {path}  {names}")
    shutil.rmtree(site)
    print(f"in the checkout on the GPU machine, for those that it has: {UNPACK.format(folder)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
