"""What `verl-mux bench rollout` says before any job starts."""

import pytest

from bench.rollouts.rollout import run_all
from verl_mux.errors import UserError
from verl_mux.launcher.run_file import JobSpec, RunFile


@pytest.mark.parametrize("keys", [[], ["data.max_response_length=${oc.env:LONGEST}"]])
def test_a_run_file_that_does_not_say_how_long_a_response_may_be_is_refused(tmp_path, keys):
    spec = JobSpec(nodes={"rollout": ["r0"], "train": ["t0"]}, overrides=keys)
    run = RunFile(dir=str(tmp_path), coordinator={}, jobs={"math": spec})
    with pytest.raises(UserError, match="data.max_response_length=; a number of tokens is needed"):
        run_all(run, ["sync"], steps=2, seeds=range(1, 2), rate=0.5, more=[])
