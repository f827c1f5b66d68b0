"""Preparing a job: what is written, that it repeats, and that it is done once."""

from __future__ import annotations

import hashlib

import prepare
import pytest
from jobs import Job, Shape, Warmup
from task import Flavour

TINY = Job(
    Shape(hidden=32, layers=1, heads=2, intermediate=64),
    Flavour(modulus=10, operators="+-", min_count=4, mean_excess=9.0, max_count=24),
    Warmup(careful=2, hasty=1, guessed=0.2, batch=4),
)


@pytest.fixture(autouse=True)
def tiny_job(monkeypatch):
    monkeypatch.setitem(prepare.JOBS, "tiny", TINY)


def digests(folder) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_same_seed_writes_the_same_files_and_another_seed_others(tmp_path):
    for folder, seed in (("one", 0), ("two", 0), ("other", 1)):
        prepare.prepare("tiny", tmp_path / folder, seed)
    one, two, other = (digests(tmp_path / folder / "tiny") for folder in ("one", "two", "other"))
    assert one == two
    for name in ("model/model.safetensors", "train.parquet", "val.parquet"):
        assert one[name] != other[name]


def test_a_folder_is_made_anew_only_where_the_arguments_changed_or_it_is_half_written(tmp_path):
    assert prepare.prepare("tiny", tmp_path, seed=0)
    assert not prepare.prepare("tiny", tmp_path, seed=0)
    assert prepare.prepare("tiny", tmp_path, seed=1)
    (tmp_path / "tiny" / prepare.STAMP).unlink()
    (tmp_path / "tiny" / "train.parquet").write_bytes(b"half")
    assert prepare.prepare("tiny", tmp_path, seed=1)
    assert (tmp_path / "tiny" / "train.parquet").read_bytes() != b"half"


def test_rows_have_what_verl_s_dataset_reads(tmp_path):
    from datasets import Dataset

    prepare.prepare("tiny", tmp_path, seed=0)
    train = Dataset.from_parquet(str(tmp_path / "tiny" / "train.parquet"), cache_dir=str(tmp_path / "cache"))
    assert len(train) == prepare.TRAIN_PROBLEMS
    row = train[5]
    assert row["data_source"] == "arithmetic/tiny"
    assert [message["role"] for message in row["prompt"]] == ["user"]
    assert row["reward_model"]["ground_truth"].isdigit()
    assert row["extra_info"]["index"] == 5


@pytest.mark.parametrize("job", prepare.JOBS)
def test_the_jobs_problems_fit_and_do_not_repeat(job, tmp_path):
    prepare._write_problems(job, tmp_path, seed=0)


def test_an_unknown_job_gets_one_line_and_exit_code_2(python, tmp_path):
    done = python(prepare.__file__, "--out", str(tmp_path), "--job", "sums")
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: --job sums: no such job; there are fibonacci, products, long_tail"]
