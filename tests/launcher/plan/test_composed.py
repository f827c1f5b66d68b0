"""Composing the jobs of a run file where verl does not answer."""

import sys

import pytest

from tests.launcher.plan.test_plan_command import RUN
from verl_mux.errors import Failure
from verl_mux.launcher.plan import composed


def test_a_config_that_takes_too_long_is_said_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text(RUN.format(at=tmp_path))
    monkeypatch.setattr(composed, "composition", lambda *_: [sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(composed, "_WITHIN_S", 0.1)
    with pytest.raises(Failure, match="config of job 'math' was not composed within 0.1 s"):
        composed.read_jobs([tmp_path / "run.yaml"])
