"""Virtual jobs on one pool."""

from __future__ import annotations

from dataclasses import replace

import pytest

from research.rollouts.bed import Bed
from research.rollouts.job import Arrival, VirtualJob
from research.rollouts.pool import Pool
from research.rollouts.recorded import recording
from verl_mux.rollout.control.oversampling import Oversampler, OversamplingPolicy
from verl_mux.rollout.lengths.rows import LengthRow, Prompt

# A decoding step costs the same whatever the batch, so a rollout takes as long on one replica as on two.
BED = Bed(batch=4, slots=64, step_s=1.0, request_s=0.0, prefill_s=0.0, train_token_s=0.0, switch_s=0.0, replicas=2)


def job(name: str, *lengths: int) -> VirtualJob:
    rows = recording([LengthRow(Prompt(str(at), ""), 0, length) for at, length in enumerate(lengths)], 0)
    return VirtualJob(name, Oversampler(OversamplingPolicy(), rows.samples), Arrival(rows), rows, BED.batch)


def test_a_job_that_comes_gets_its_share_at_once_and_nobody_loses_a_token():
    jobs = [job("a", *[100] * 4), job("b", *[100] * 4)]
    # Nothing of the first rollout's ends before all of it does: there is no tail to gather, only a replica that it was lent.
    assert Pool(jobs, BED, 100, shared=True).run() == pytest.approx(100.0)
    assert [(it.totals.trained_tokens, it.totals.wasted) for it in jobs] == [(400, 0), (400, 0)]


def test_without_sharing_jobs_take_turns():
    assert Pool([job("a", *[100] * 4), job("b", *[100] * 4)], BED, 100, shared=False).run() == pytest.approx(200.0)


def test_what_nobody_wants_is_used_again():
    crowded = replace(BED, step_s=0.0, request_s=1.0)  # a step takes as long as it has requests
    assert Pool([job("a", *[100] * 4), job("b", 1)], crowded, 100, shared=True).run() < 300.0
