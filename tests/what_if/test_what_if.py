"""What-if beside runs that were made under the very keys that are asked about, by a generator that knows nothing of it."""

import json

import numpy as np
import pytest

from tests.profiling.made_engines import EPOCH, Job, Made, make
from tests.what_if.drifting import Machine, held
from verl_mux.errors import UserError
from verl_mux.profiling.plain.lines import find_log_files
from verl_mux.profiling.report.input.run_log import read_files
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.what_if.advice import advise, line
from verl_mux.what_if.recorded_run import recordings, stays_of
from verl_mux.what_if.what_if import WhatIf, drift_of, interval_of


def analysis(directory) -> Analysis:
    return Analysis(read_files(directory, find_log_files(directory)))


def models(directory) -> dict[str, WhatIf]:
    read = analysis(directory)
    return {it.job: WhatIf(it, stays_of(read, it.job)) for it in recordings(read)}


def tell(directory, keys):
    """The job's keys, as it says them when it begins."""
    line = {"timestamp": EPOCH.isoformat(), "event": "job_keys", "workid": 0, "step": 0, "role": "trainer", "job": "a"}
    line |= {"run": "0a1b2c3d", "extra": {"keys": [f"{key}={value}" for key, value in keys.items()]}}
    folder = directory / "a" / "events" / "trainer" / "step_0"
    folder.mkdir(parents=True)
    (folder / "worker_0.jsonl").write_text(json.dumps(line) + "\n")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plain")
    make(directory, seed=1, steps=8, requests=32, prepare=0.001)
    return models(directory)["a"]


def test_the_recorded_keys_give_what_was_recorded(plain):
    measured = [step.rollout_s + step.rest_s for step in plain.recording.steps]
    assert plain.base.step_s == pytest.approx(sum(measured) / len(measured), rel=0.05)
    assert plain.predict({"mux.rollout.dispatch.order": "fifo"}).change == pytest.approx(0.0, abs=1e-9)


def test_a_machine_that_drifts_widens_what_is_foretold():
    """Two runs differ by it whatever their keys."""
    steady, drifting = np.zeros(16), np.repeat([0.0, 0.1, 0.2, 0.1], 4)
    assert drift_of(steady) == 0
    assert interval_of(0.8, [0.79, 0.8, 0.81], drift_of(steady)) == pytest.approx((0.791 - 1, 0.809 - 1), abs=0.002)
    low, high = interval_of(0.8, [0.79, 0.8, 0.81], drift_of(drifting))
    assert low < 0.69 - 1 and high > 0.93 - 1


@pytest.mark.parametrize("machine", [Machine(0.0, 1), Machine(0.1, 4)], ids=["steady", "drifting"])
def test_intervals_hold_what_a_second_run_on_the_machine_had(machine):
    # What a second run has for being on other prompts is not in an interval; nor would nine of ten be held in every eight.
    assert sum(held(machine, seed) for seed in range(8)) >= 6


def test_a_lower_limit_ends_the_rollout_that_much_sooner(plain):
    longest = plain.recording.longest
    it = plain.predict({"data.max_response_length": str(longest // 2)})
    assert it.outcome.rollout_s / it.base.rollout_s == pytest.approx(0.5, rel=0.1)
    assert it.interval[0] <= it.change <= it.interval[1] < 0
    assert it.reward_at_stake is None  # all responses got the same score: none is worth more than another


def test_over_sampling_is_foretold_from_a_run_without(plain, tmp_path):
    make(tmp_path, seed=2, steps=12, requests=32, over=0.5, prepare=0.001)
    made = models(tmp_path)["a"]
    measured = sum(step.rollout_s for step in made.recording.steps[4:]) / 8  # of those with left-overs
    it = plain.predict({"mux.rollout.oversample.rate": "0.5", "mux.rollout.oversample.max_cuts": "100"})
    assert it.outcome.rollout_s == pytest.approx(measured, rel=0.1)
    assert it.outcome.lag > 0


@pytest.mark.parametrize(
    "text",
    [
        *("mux.rollout.oversample.rate=-1", "mux.rollout.oversample.rate=inf", "mux.rollout.oversample.rate=1e12"),
        *("data.max_response_length=0", "data.max_response_length=9999", "data.train_batch_size=99999999999"),
    ],
)
def test_what_is_not_possible_is_refused_with_what_is(plain, text):
    key, value = text.split("=")
    with pytest.raises(UserError, match="allowed"):
        plain.predict({key: value})


def test_a_key_that_no_recording_can_tell_of_is_refused(plain):
    with pytest.raises(UserError, match=r"actor.optim.lr: cannot be tried on a recorded run; allowed: data\."):
        plain.predict({"actor.optim.lr": "1"})


def test_a_log_without_times_of_steps_says_so(tmp_path):
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / "worker_0.jsonl").write_text('{"timestamp":"2025-08-11T23:19:45","event":"step","duration_sec":1}\n')
    with pytest.raises(UserError, match="cannot be run again"):
        advise(analysis(tmp_path))


def test_advice_is_told_best_first_as_keys_and_values(tmp_path):
    make(tmp_path, seed=3, steps=5, requests=24, replicas=2, prepare=0.001)
    told = advise(analysis(tmp_path))
    (job,) = told["jobs"].values()
    changes = [it["step_change"] for it in job["predictions"]]
    assert changes == sorted(changes) and all(change <= -0.03 for change in changes)
    assert told["lines"][0].startswith("a: mux.rollout.") and " % step (" in told["lines"][0]


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({"trainer.v1.trainer_mode": "sync"}, ("oversample", "segments", "order")),
        ({"trainer.v1.trainer_mode": "mux_separate", "mux.rollout.tail": "defer"}, ("oversample", "segments")),
        ({"trainer.v1.trainer_mode": "mux_separate", "actor_rollout_ref.rollout.max_num_seqs": 6}, ("oversample",)),
    ],
)
def test_what_the_job_would_refuse_is_not_advised(tmp_path, keys, refused):
    make(tmp_path, seed=3, steps=3, requests=12, replicas=2, prepare=0.001)
    tell(tmp_path, keys)
    (job,) = advise(analysis(tmp_path))["jobs"].values()
    advised = [key for it in job["predictions"] for key in it["keys"]]
    assert job["recorded"]["keys"].keys() == keys.keys()
    assert not [key for key in advised if set(key.split(".")) & set(refused)]


def test_a_job_that_cannot_be_run_again_costs_the_others_nothing(tmp_path):
    make(tmp_path, seed=3, steps=3, requests=12, replicas=2, prepare=0.001)
    Made(tmp_path, Job(seed=4, steps=3, requests=4), run="4e5f6a7b", name="b")
    told = advise(analysis(tmp_path))
    assert list(told["jobs"]) == ["a"] and told["lines"][0].startswith("a: ")
    assert told["lines"][-1] == "b cannot be run again: too few stays in engines say how long they took"


def test_a_line_says_time_reward_and_staleness(plain):
    it = plain.predict({"mux.rollout.oversample.rate": "0.5"})
    assert line(it).startswith("mux.rollout.oversample.rate 0.5: -") and line(it).endswith("versions behind")
