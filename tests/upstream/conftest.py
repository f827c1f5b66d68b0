"""One process imports verl and SGLang as a job does, for all tests here."""

import json
from pathlib import Path

import pytest

from verl_mux.platform.choose import accelerator_present


@pytest.fixture(scope="session")
def probe(python) -> dict:
    result = python(
        "-m", "tests.upstream.probe", "trainer.v1.trainer_mode=mux_separate",
        cwd=Path(__file__).parents[2], timeout=300, VERL_PLATFORM="cpu" if accelerator_present() else None,
        RAY_ADDRESS=None,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])
