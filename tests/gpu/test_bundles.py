"""What is carried to a GPU machine is cut into files within the limit, and comes together there."""

import importlib.metadata
import random
import subprocess
from pathlib import Path

from tests.gpu import bundles

LOCK = (Path(__file__).parents[2] / "requirements/lock.txt").read_text().splitlines()


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


def test_what_is_packed_within_the_limit_is_unpacked_by_one_command(tmp_path):
    site, files, random_bytes = tmp_path / "made", {}, random.Random(0).randbytes
    for name in ("a/one.py", "a/two.bin", "b/three.so"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(files.setdefault(name, random_bytes(50_000)))
    made = [*bundles.pack(site, [*files][:2], tmp_path / "A", 60_000), *bundles.pack(site, [*files][2:], tmp_path / "B", 60_000)]
    assert [it.name for it in made] == ["A.00", "A.01", "B.00"] and max(it.stat().st_size for it in made) == 60_000
    command = bundles.UNPACK.format(tmp_path).replace("/tmp/site", str(tmp_path / "site"))
    subprocess.run(["bash", "-ec", command], check=True)
    assert {name: (tmp_path / "site" / name).read_bytes() for name in files} == files


def test_our_own_packages_come_as_their_entry_points_alone(tmp_path):
    bundles.name_own(tmp_path)
    assert {it.name for it in tmp_path.rglob("*") if it.is_file()} == {"METADATA", "RECORD", "entry_points.txt"}
    (named,) = importlib.metadata.distributions(name="verl-mux", path=[str(tmp_path)])
    assert [it.value for it in named.entry_points.select(group="verl.plugins")] == ["verl_mux.plugin"]
    assert sum(map(len, bundles.packages(tmp_path).values())) == 6
