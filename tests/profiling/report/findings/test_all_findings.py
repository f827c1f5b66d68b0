"""What the report finds on logs with known answers, and that it finds nothing where nothing is wrong."""

import random

import pytest

from tests.profiling.made_logs import SEED_LINES, Lines, Made, make_run, make_shares, read_run
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output.summary import DETECTORS, find_all


def found(directory):
    return find_all(Analysis(read_run(directory)))


def kinds(directory):
    return [finding.kind for finding in found(directory)]


LARGE = {"requests": 512, "workers": 4, "steps": 2, "first_step": 66}
STALL = {(67, 0): (12.0, 150.0)}


@pytest.mark.parametrize("known", [{}, {"tokens": False}, {"tokens": False, "parts": False}])
def test_the_silent_gap_of_the_seed_is_found_at_its_worker_with_its_length(tmp_path, known):
    (gap,) = found(make_run(tmp_path, Made(**LARGE, stalls=STALL, **known)))
    assert (gap.kind, gap.step, gap.worker) == ("silent_gap", 67, 0)
    assert gap.seconds == pytest.approx(150.0, abs=0.2)
    assert gap.evidence["workers"] == [0]


def test_a_gap_and_the_two_requests_of_the_seed_are_told_apart(tmp_path):
    made = Made(**LARGE, stalls=STALL, slow_rewards={(67, 0, 5): 150.0}, slow_turns={(67, 0, 9): 150.0})
    told = {finding.kind: finding for finding in found(make_run(tmp_path, made))}
    assert set(told) == {"silent_gap", "reward_wait", "slow_turn"}
    assert told["reward_wait"].request_id == "67-0-5"
    assert (told["slow_turn"].request_id, told["slow_turn"].turn) == ("67-0-9", 2)
    assert told["silent_gap"].seconds == pytest.approx(150.0, abs=0.2)


def test_workers_that_stand_still_together_share_one_finding(tmp_path):
    stalls = {(67, worker): (12.0, 100.0) for worker in (1, 2)}
    (gap,) = found(make_run(tmp_path, Made(**LARGE, stalls=stalls)))
    assert gap.evidence["workers"] == [1, 2]


# What was made -> kind and turn of the one finding, seconds, and how exactly they are known.
SLOW = {
    "reward": ({"slow_rewards": {(2, 1, 5): 160.0}}, ("reward_wait", None, 160.0, 0.1)),
    "reward without tokens": ({"slow_rewards": {(2, 1, 5): 160.0}, "tokens": False}, ("reward_wait", None, 160.0, 0.1)),
    "second turn": ({"slow_turns": {(2, 1, 5): 150.0}}, ("slow_turn", 2, 155.0, 10.0)),
    "second turn without tokens": ({"slow_turns": {(2, 1, 5): 150.0}, "tokens": False}, ("slow_turn", 2, 155.0, 10.0)),
    "request without parts": ({"slow_rewards": {(2, 1, 5): 160.0}, "parts": False}, ("slow_request", None, 170.0, 20.0)),
}


@pytest.mark.parametrize("name", SLOW)
def test_what_is_slow_in_a_request_is_found_and_named(tmp_path, name):
    made, (kind, turn, seconds, within) = SLOW[name]
    (slow,) = found(make_run(tmp_path, Made(**made)))
    assert (slow.kind, slow.step, slow.worker, slow.request_id, slow.turn) == (kind, 2, 1, "2-1-5", turn)
    assert slow.seconds == pytest.approx(seconds, abs=within)


def test_a_pause_of_tenths_of_a_second_is_none(tmp_path):
    quick = Made(seconds_per_token=0.004, preprocess=0.05, slow_rewards={(2, 1, 5): 0.8})  # steps of two seconds
    assert found(make_run(tmp_path, quick)) == []


def in_waves(directory, steps, workers=4, slots=32, waves=2, slow=None):
    """Requests that wait for a slot in the engine; `slow`: (step, worker, number, seconds), that much more in the engine."""
    rng = random.Random(0)
    for step in range(1, steps + 1):
        for worker in range(workers):
            lines, free = Lines(worker, step), [0.0] * slots
            for number in range(slots * waves):
                about = {"request_id": f"{step}-{worker}-{number}"}
                work = 20 * rng.uniform(0.8, 1.2)
                told = about | {"turn": 0, "generated_tokens": int(25 * work)}
                slot = free.index(min(free))
                free[slot] = end = free[slot] + work + (slow[3] if slow and slow[:3] == (step, worker, number) else 0.0)
                lines.add(1000.0 * step + end, "turn_engine_call", end, told)  # as the caller sees it, the wait included
                lines.add(1000.0 * step + end, "async_rollout_request_complete", end, about)
            lines.write(directory)
    return directory


def test_waves_of_requests_that_wait_for_a_slot_are_no_stall(tmp_path):
    assert kinds(in_waves(tmp_path, steps=4)) == []


def test_a_slow_turn_is_found_among_turns_that_waited_for_a_slot(tmp_path):
    (slow,) = found(in_waves(tmp_path, steps=1, waves=4, slow=(1, 2, 40, 400.0)))
    assert (slow.kind, slow.request_id) == ("slow_turn", "1-2-40")


def test_a_slow_worker_is_found_in_all_its_steps(tmp_path):
    made = Made(slower={(1, 2): 2.5, (3, 2): 2.5})
    (slow,) = found(make_run(tmp_path, made))
    assert (slow.kind, slow.worker, slow.evidence["steps"]) == ("straggler", 2, [1, 3])
    assert "the engine of worker 2" in slow.advice


def test_a_long_tail_is_found_with_advice_on_the_length(tmp_path):
    made = Made(two_turns=0.0, lengths=lambda rng: min(rng.lognormvariate(5.0, 0.8), 4000.0))
    (tail,) = found(make_run(tmp_path, made))
    assert tail.kind == "long_tail"
    assert "maximum response length" in tail.advice


def test_heavy_preprocessing_is_found_with_the_seeds_share(tmp_path):
    (heavy,) = found(make_shares(tmp_path))
    assert heavy.kind == "preprocessing"
    assert heavy.evidence["share"] == pytest.approx(0.1857, abs=1e-4)


HEALTHY_LENGTHS = [
    lambda rng: 150 + 350 * rng.betavariate(3, 2),
    lambda rng: rng.uniform(300, 600),
    lambda rng: max(rng.gauss(500, 60), 50),
    lambda rng: min(rng.lognormvariate(6, 0.2), 800),
]


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_random_run_has_no_findings(tmp_path, seed):
    rng = random.Random(seed)
    made = Made(
        seed=seed, steps=rng.randint(1, 5), workers=rng.choice([1, 2, 4, 8]), requests=rng.choice([8, 16, 32, 64, 128]),
        two_turns=rng.random(), lengths=HEALTHY_LENGTHS[seed % 4], tokens=rng.random() < 0.5, parts=rng.random() < 0.7,
        preprocess=rng.uniform(0.1, 1.0),
    )  # fmt: skip
    assert kinds(make_run(tmp_path, made)) == []


def test_the_seeds_own_lines_have_no_findings(tmp_path):
    path = tmp_path / "step_4" / "worker_2.jsonl"
    path.parent.mkdir()
    path.write_text("\n".join(SEED_LINES) + "\n")
    assert kinds(tmp_path) == []


def test_every_kind_has_a_name_of_its_own():
    kinds_found = [kind for kinds in DETECTORS.values() for kind in kinds]
    assert len(set(kinds_found)) == len(kinds_found)
