"""`python -m tests.gpu.bundles FOLDER`: what a GPU machine without a package index lacks beside torch (Python 3.12, x86-64).

Writes FOLDER/A.00 and so on, of at most 60 MB each, to be carried one by one: A for probe.py, B the engine, C verl and what else
these need, D Ray. Versions are those of requirements/lock.txt. The files of a letter, one after the other, are one .tar.gz;
`UNPACK` unpacks those of any letters. Our code comes with the checkout: of our packages only what names their entry points is
there.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import io
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT = 60 * 10**6
UNPACK = "mkdir -p /tmp/site && cat {}/?.* | tar -xzi -C /tmp/site && export PYTHONPATH=$PWD:/tmp/site"
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
    "A": "annotated-doc click markdown-it-py mdurl msgspec numpy psutil pygments rich shellingham torch-memory-saver typer "
    "typing-extensions verl-mux verl-mux-cpu xxhash",
    "B": "apache-tvm-ffi flashinfer-python huggingface-hub safetensors sgl-deep-gemm sglang sglang-kernel tokenizers "
    "transformers xgrammar",
    "D": "ray",
}  # fmt: skip
OF = {name: letter for letter, names in BUNDLES.items() for name in names.split()}


class Cut(io.RawIOBase):
    """What is written goes to files PATH.00, PATH.01 and so on, of at most `limit` bytes each."""

    def __init__(self, path: Path, limit: int = LIMIT) -> None:
        self._path, self._limit, self._left = path, limit, 0
        self.files: list[Path] = []

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        rest = memoryview(data)
        while rest:
            if not self._left:
                self.files.append(self._path.with_suffix(f".{len(self.files):02}"))
                self._left = self._limit
            part, rest = rest[: self._left], rest[self._left :]
            with self.files[-1].open("ab") as file:
                file.write(part)
            self._left -= len(part)
        return len(data)


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


def packages(site: Path) -> dict[str, list[str]]:
    """By name, each package's files."""
    found = {}
    for package in importlib.metadata.distributions(path=[str(site)]):
        files = [str(file) for file in package.files or [] if str(file) not in FILES_LEFT_OUT]
        found[canonical(package.name)] = [file for file in files if (site / file).is_file()]
    return found


def pack(site: Path, files: Iterable[str], path: Path, limit: int = LIMIT) -> list[Path]:
    """Into PATH.00 and so on. Compressed as little as can be: to do better takes tens of minutes and saves a fifth."""
    cut: Any = Cut(path, limit)
    with gzip.GzipFile(fileobj=cut, mode="wb", compresslevel=1) as packed, tarfile.open(fileobj=packed, mode="w|") as tar:
        for file in files:
            tar.add(site / file, arcname=file)
    return cut.files


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    site = folder / "site"
    install(site)
    name_own(site)
    found = packages(site)
    for letter in "ABCD":
        names = sorted(name for name in found if OF.get(name, "C") == letter)
        for path in pack(site, [file for name in names for file in found[name]], folder / letter):
            print(f"{path.stat().st_size / 1e6:6.1f} MB  {path}")
    shutil.rmtree(site)
    print(f"in the checkout on the GPU machine, for those that it has: {UNPACK.format(folder)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
