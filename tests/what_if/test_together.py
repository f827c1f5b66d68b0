"""Jobs that took turns, run again together: beside engines that share no code with what-if, and beside sums done by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest

from tests.rollout.lengths.length_generators import generate
from tests.what_if import taking_turns
from tests.what_if.ranking import BED, Analysis, find_log_files, read_files, run, virtual_job
from tests.what_if.second_simulator import recording
from verl_mux.rollout.control.oversampling import Oversampler
from verl_mux.rollout.control.replica_plan import MigrationPolicy
from verl_mux.what_if.advice import advise
from verl_mux.what_if.recorded_run import Group, Recording, Sample, recorded, recordings, stays_of
from verl_mux.what_if.rerun import Rerun, Speed
from verl_mux.what_if.together import LeaseQueue, Share, Sharing, Together, sharings
from verl_mux.what_if.what_if import Training, WhatIf

NODES = {"wide": {"rollout": ["r0", "r1"], "train": ["t0"]}, "narrow": {"rollout": ["r1"], "train": ["t0"]}}
TURNS = dict.fromkeys(NODES, 2)


def test_who_asks_gets_all_its_nodes_or_waits_for_them():
    queue = LeaseQueue(NODES, TURNS, "interleaved")
    queue.ask("wide", "rollout", 1)
    queue.ask("narrow", "rollout", 1)
    assert list(queue.granted()) == ["wide"] and queue.gangs("wide") == [["r1"]]
    queue.give_back("wide", ["r0"])
    assert not list(queue.granted())
    queue.give_back("wide", ["r1"])
    assert list(queue.granted()) == ["narrow"] and queue.gangs("narrow") == []


def test_in_a_sequential_part_the_other_waits_until_the_first_is_through():
    queue = LeaseQueue(NODES, TURNS, "sequential")
    for step in (1, 2):
        queue.ask("wide", "rollout", step)
        if step == 1:
            queue.ask("narrow", "rollout", 1)
        assert list(queue.granted()) == ["wide"]
        queue.give_back("wide")
        queue.ended("wide", step)
    assert list(queue.granted()) == ["narrow"]


STEPS = 16
MIGRATES = {"mux.rollout.migration": "true"}


def whole(rows, **keys):
    """STEPS steps of a job alone."""
    its = recording(rows, seed=0)
    return run(virtual_job(its, Oversampler(its.samples, **keys), BED), BED, STEPS)


@pytest.fixture(scope="module")
def lengths():
    return {name: generate("long_tail", seed=seed, prompts=160)[0] for name, seed in (("a", 3), ("b", 4))}


@pytest.fixture(scope="module")
def log(lengths, tmp_path_factory):
    """What two jobs that took turns logged, and their leases."""
    directory = tmp_path_factory.mktemp("turns")
    alone = {name: whole(rows) for name, rows in lengths.items()}
    held = taking_turns.take_turns(alone)
    taking_turns.write(alone, held, directory)
    return Analysis(read_files(directory, find_log_files(directory))), alone, held


@pytest.fixture(scope="module")
def together(log):
    models = {it.job: WhatIf(it, stays_of(log[0], it.job)) for it in recordings(log[0])}
    (sharing,) = sharings(log[0], {name: model.recording for name, model in models.items()})
    return Together(sharing, models)


def test_what_a_step_holds_of_the_nodes_is_read_from_the_leases(together):
    share = together.sharing.shares["a"]
    assert (share.rollout, share.train, share.replicas, share.steps) == (("r0", "r1"), ("t0",), {"r0": (0,), "r1": (1,)}, STEPS)
    told = share.before_s, share.after_s, share.between_s
    assert told == pytest.approx((taking_turns.BEFORE_S, taking_turns.AFTER_S, taking_turns.BETWEEN_S), abs=1e-3)


def test_the_recorded_keys_give_the_recorded_makespan(together, log):
    assert together.base_s == pytest.approx(taking_turns.makespan(log[2]), rel=0.02)
    assert together.sharing.recorded_s == pytest.approx(taking_turns.makespan(log[2]), rel=0.001)


@pytest.mark.parametrize("jobs", [["a"], ["a", "b"]], ids=["one", "both"])
def test_over_sampling_is_foretold_for_all_jobs_together(together, log, lengths, jobs):
    _, alone, held = log
    tried = alone | {name: whole(lengths[name], rate=1.0, max_cuts=8) for name in jobs}
    true = taking_turns.makespan(taking_turns.take_turns(tried)) / taking_turns.makespan(held) - 1
    keys = {"mux.rollout.oversample.rate": "1", "mux.rollout.oversample.max_cuts": "8"}
    it = together.predict(dict.fromkeys(jobs, keys))
    assert 1 + it.change == pytest.approx(1 + true, rel=0.05)
    assert it.interval[0] <= true <= it.interval[1] < 0


def test_advice_says_what_the_jobs_take_together(log):
    told = advise(log[0], {"data.max_response_length": "100"})
    (shared,) = told["together"]
    assert shared["jobs"] == ["a", "b"] and shared["predictions"][0]["change"] < -0.1
    assert told["lines"][-1].startswith("a, b together: data.max_response_length 100: -")
    assert told["lines"][0].startswith("a: data.max_response_length 100: -") and " % GPU-seconds" in told["lines"][0]


class Known:
    """A model of a job all of whose rollouts are alike: its one step's responses of so many tokens, a hundredth of a second each;
    one read again takes two hundredths a token. Training takes three seconds."""

    def __init__(self, tokens, told):
        groups = tuple(Group(f"p{number}", 0, (Sample(length, 0, 0.0, None),)) for number, length in enumerate(tokens))
        keys = {"data.train_batch_size": str(len(tokens)), "trainer.v1.trainer_mode": "mux_separate", **told}
        self.recording = Recording("", keys, groups, (), replicas=min(len(tokens), 2), slots=None, unknown=0)
        self.settings, self.drift = recorded(self.recording), 0.0

    def rerun(self, settings, world):
        return Rerun(settings, self.recording, cycle(self.recording.groups), Speed(0.01, 0.0, 0.0, 0.02), 0.0)

    def training(self, world):
        return Training(3.0, 0.0, 0.0)


WIDE = Share(("r0", "r1"), ("t0",), {"r0": (0,), "r1": (1,)}, 0.0, 0.0, 0.0, steps=1)


@pytest.mark.parametrize(
    ("wants", "seconds"),
    [
        # Without: both responses first, 12 s; then the narrow job's 5 s and 3 s of training.
        (("r0", False), 20.0),
        (("r1", False), 20.0),
        # The idle node goes at 2 s; the narrow job is through at 10 s, the wide one at 12 + 3.
        (("r0", True), 15.0),
        # What runs on the wanted node moves at 2 s, and its 200 tokens are read again in 4 s: 16 + 3.
        (("r1", True), 19.0),
    ],
)
def test_a_tail_gives_up_the_node_that_another_waits_for(wants, seconds, monkeypatch):
    monkeypatch.setattr("verl_mux.what_if.together.POLICY", MigrationPolicy(threshold=0.5, min_gain_s=0.0, max_slowdown=9.0))
    node, migrates = wants
    narrow = Share((node,), ("t1",), {node: (0,)}, 0.0, 0.0, 0.0, steps=1)
    models = {"wide": Known([200, 1200], {}), "narrow": Known([500], {})}
    model = Together(Sharing({"wide": WIDE, "narrow": narrow}, "interleaved", 0.0), models)
    assert model.predict({"wide": MIGRATES} if migrates else {}).seconds == pytest.approx(seconds)


def test_where_replicas_are_on_no_known_node_nothing_migrates():
    blind = replace(WIDE, replicas={})
    narrow = Share(("r0",), ("t1",), {}, 0.0, 0.0, 0.0, steps=1)
    models = {"wide": Known([200, 1200], {}), "narrow": Known([500], {})}
    model = Together(Sharing({"wide": blind, "narrow": narrow}, "interleaved", 0.0), models)
    assert model.predict({"wide": MIGRATES}).change == 0


def test_in_a_sequential_part_one_job_is_through_before_the_next_begins():
    models = {"wide": Known([200, 1200], {}), "narrow": Known([500], {})}
    apart = Share(("r2",), ("t2",), {"r2": (0,)}, 0.0, 0.0, 0.0, steps=2)
    seconds = [
        Together(Sharing({"wide": WIDE, "narrow": apart}, mode, 0.0), models).base_s for mode in ("interleaved", "sequential")
    ]
    assert seconds == pytest.approx([16.0, 15.0 + 16.0])
