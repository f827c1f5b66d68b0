"""Hosts out of namespaces, as examples/hosts.yaml has them, but in a bed of their own, beside which that run may go on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "hosts"
sys.path.insert(0, str(EXAMPLE))

from bed import Bed, BedError, require_root  # noqa: E402

NAME, SUBNET = "muxtest", "10.78.0"
HOSTS = ("hosta", "hostb", "hostc")


@pytest.fixture(scope="session")
def bed(tmp_path_factory) -> Iterator[Bed]:
    """Three hosts, which see the tests' folders."""
    try:
        require_root()
    except BedError as error:
        pytest.skip(str(error))
    with Bed(NAME, SUBNET) as made:
        try:
            made.make(HOSTS, shared=[tmp_path_factory.getbasetemp()])
        except BedError as error:
            pytest.skip(f"the kernel does not let hosts be made: {error}")
        yield made


def via(host: str) -> list[str]:
    """The words that lead to a host, as in a run file."""
    return [sys.executable, str(EXAMPLE / "bed.py"), "--name", NAME, "enter", host]


SMALL_RAY = ("--ray", "--num-cpus=32 --object-store-memory=100000000")


def with_clusters(file: Path, bed: str, command: list[str], *options: str) -> list[str]:
    """The recipe's command line that runs `command` while the jobs of `file` have their Ray clusters and agents on that bed."""
    enter = f"{sys.executable} {EXAMPLE / 'bed.py'} --name {bed} enter {{host}}"
    return [
        sys.executable,
        str(ROOT / "recipes" / "cluster" / "clusters.py"),
        str(file),
        "--via",
        enter,
        *options,
        "--",
        *command,
    ]
