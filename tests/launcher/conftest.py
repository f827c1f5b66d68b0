from __future__ import annotations

import pytest

from tests.launcher.runs import Runs


@pytest.fixture
def runs(tmp_path):
    here = Runs(tmp_path)
    yield here
    here.end_all()
