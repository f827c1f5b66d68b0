"""The example's modules are scripts beside one another: importable as they are when one of them runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ARITHMETIC = Path(__file__).parents[2] / "examples" / "arithmetic"
sys.path.insert(0, str(ARITHMETIC))


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """The example's tokenizer, written and read back."""
    from model import write_tokenizer
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)
