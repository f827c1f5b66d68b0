"""What is carried to a GPU machine is cut into files within the limit, and comes together there."""

import importlib.metadata
import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gpu import bundles

LOCK = (Path(__file__).parents[2] / "requirements/lock.txt").read_text().splitlines()


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(60, 200))
def test_a_package_is_cut_into_parts_within_the_limit_that_have_every_file_once(sizes, limit):
    files = [(f"f{at}", size) for at, size in enumerate(sizes)]
    found = bundles.parts(files, lambda names: " ".join(names).encode() * 3, limit)
    assert all(len(part) <= limit for part in found)
    assert [name for part in found for name in part[: len(part) // 3].decode().split()] == [name for name, _ in files]


def test_a_file_that_is_larger_by_itself_is_named():
    with pytest.raises(ValueError, match="large.so takes 9 bytes packed, at most 5 are allowed"):
        bundles.parts(
            [("a", 1), ("large.so", 9), ("b", 1)], lambda names: b"".join(b"9" * (9 if "." in n else 1) for n in names), 5
        )


@given(st.lists(st.integers(0, 60), max_size=30))
def test_each_name_is_in_one_box_and_no_box_is_over_the_limit(listed):
    sizes = {f"p{at}": size for at, size in enumerate(listed)}
    boxes = bundles.filled(sizes, 60)
    assert sorted(name for box in boxes for name in box) == sorted(sizes)
    assert all(sum(sizes[name] for name in box) <= 60 for box in boxes)
    assert len(boxes) <= max(1, 2 * sum(sizes.values()) // 60 + 1)


def test_torch_and_what_it_brings_are_left_out_and_every_package_named_is_in_the_lock():
    kept = {bundles.canonical(line.partition("==")[0]) for line in bundles.wanted(LOCK)}
    assert not kept & {
        "torch",
        "triton",
        "nvidia-cublas",
        "nvidia-nccl-cu13",
        "nvidia-nvtx",
        "cuda-toolkit",
        "ruff",
        "flashinfer-cubin",
    }
    assert {"nvtx", "nvidia-ml-py", "nvidia-cudnn-frontend", "torch-memory-saver", "torchdata"} <= kept
    assert set(bundles.OF) - set(bundles.OWN) <= kept


def test_what_is_packed_is_unpacked_by_one_command(tmp_path):
    site, files, random_bytes = tmp_path / "made", {}, random.Random(0).randbytes
    for name in ("a/one.py", "a/two.bin", "b/three.so"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(files.setdefault(name, random_bytes(50_000)))
    cut = bundles.parts([(name, 50_000) for name in files], lambda names: bundles.packed(site, names), 60_000)
    assert len(cut) == 3
    (tmp_path / "A1.tar.xz").write_bytes(cut[0] + cut[1])
    (tmp_path / "B1.tar.xz").write_bytes(cut[2])
    command = bundles.UNPACK.format(tmp_path).replace("/tmp/site", str(tmp_path / "site"))
    subprocess.run(["bash", "-ec", command], check=True)
    assert {name: (tmp_path / "site" / name).read_bytes() for name in files} == files


def test_our_own_packages_come_as_their_entry_points_alone(tmp_path):
    bundles.name_own(tmp_path)
    assert {it.name for it in tmp_path.rglob("*") if it.is_file()} == {"METADATA", "RECORD", "entry_points.txt"}
    (named,) = importlib.metadata.distributions(name="verl-mux", path=[str(tmp_path)])
    assert [it.value for it in named.entry_points.select(group="verl.plugins")] == ["verl_mux.plugin"]
    assert sum(map(len, bundles.packages(tmp_path).values())) == 6
