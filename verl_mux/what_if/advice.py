"""Which keys are worth trying on a recorded run, and what each would bring. Text and JSON; the sums are what_if.py's.

Runs on the command line; called by report_command.py; pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from verl_mux.errors import UserError
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.rollout.control.launch_order import ORDERS
from verl_mux.what_if.recorded_run import Recording, changed, recordings, stays_of
from verl_mux.what_if.what_if import Outcome, Prediction, WhatIf

RATES = (0.25, 0.5, 1.0)
WORTH = 0.03  # of the step; less is not shown
MAX_AT_STAKE = 0.02  # of the reward
FEW = 5
QUANTILES = (0.5, 0.75, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)
ROUND_TO = 64  # tokens
MAX_LIMITS = 3


def advise(analysis: Analysis, what_if: Mapping[str, str] | None = None) -> dict[str, Any]:
    """{"jobs": {job: {"recorded", "predictions", ...}}, "lines"}: under `what_if`, or under whatever is worth trying.

    Raises:
        UserError: no job of the log can be run again, or a key of `what_if` cannot be tried.
    """
    jobs, lines, failed = {}, list[str](), list[str]()
    for recording in recordings(analysis):
        try:
            model = WhatIf(recording, stays_of(analysis, recording.job))
        except UserError as error:  # the others' advice is worth no less
            failed.append(str(error))
            continue
        found = [model.predict(what_if)] if what_if else _best(model)
        jobs[recording.job] = _as_dict(recording, model, found)
        name = f"{recording.job}: " if recording.job else ""
        lines += [name + line(it) for it in found] or [f"{name}nothing that was tried saves {WORTH:.0%} of the step"]
    if not jobs:
        raise UserError("; ".join(failed))
    return {"jobs": jobs, "lines": lines + failed}


def line(it: Prediction) -> str:
    """As in "data.max_response_length 600: -23 % step (-26 to -20), -12 % GPU-seconds, 0.4 % of reward at stake"."""
    low, high = it.interval
    text = f"{_text(it.keys)}: {_signed(it.change)} % step ({_signed(low)} to {_signed(high)})"
    text += f", {_signed(it.gpu_change)} % GPU-seconds"
    if it.reward_at_stake is not None:
        text += f", {100 * max(it.reward_at_stake, 0.0):.1f} % of reward at stake"
    if it.outcome.lag > it.base.lag + 0.005:
        text += f", tokens {it.outcome.lag:.2f} versions behind"
    return text


def _signed(part: float) -> str:
    return f"{round(100 * part):+d}"


def _best(model: WhatIf) -> list[Prediction]:
    """One of each kind, best first: those that save WORTH of the step even by the interval's cautious end."""
    best: dict[str, Prediction] = {}
    for keys in _candidates(model):
        if not changed(model.settings, keys).is_possible:
            continue
        it = model.predict(keys)
        kind = next(iter(keys)).rpartition(".")[0]
        worth = it.change <= -WORTH and it.interval[1] <= 0 and (it.reward_at_stake or 0.0) <= MAX_AT_STAKE
        if worth and (kind not in best or it.change < best[kind].change):
            best[kind] = it
    return sorted(best.values(), key=lambda it: it.change)[:FEW]


def _candidates(model: WhatIf) -> Iterator[dict[str, str]]:
    settings = model.settings
    keys = settings.rollout
    for limit in _limits(model.recording):
        yield {"data.max_response_length": str(limit)}
    if keys.segments.segment_length is None:
        for rate in RATES:
            if rate != keys.oversample.rate:
                yield {"mux.rollout.oversample.rate": f"{rate:g}"}
    if keys.oversample.rate == 0:
        for parts in (4, 2):
            yield {
                "mux.rollout.segments.segment_length": str(math.ceil(settings.longest / parts)),
                "mux.rollout.segments.max_segments": str(parts),
            }
    if not keys.defers and model.recording.recurs:
        yield {"mux.rollout.tail": "defer"}
    for order in ORDERS:
        if order != keys.launch_order:
            yield {"mux.rollout.dispatch.order": order}


def _limits(recording: Recording) -> list[int]:
    """Shorter limits of a response's length, rounded quantiles of the recorded lengths, beyond which lies next to none of the
    reward above the worst one given; without scores, none."""
    scored = [sample for group in recording.groups for sample in group.samples if sample.score is not None]
    if not scored:
        return []
    tokens, scores = (np.array([getattr(sample, name) for sample in scored], dtype=float) for name in ("tokens", "score"))
    earned = scores - scores.min()
    tried = {max(math.ceil(tokens_at / ROUND_TO), 1) * ROUND_TO for tokens_at in np.quantile(tokens, QUANTILES)}
    fit = [limit for limit in sorted(tried) if earned[tokens > limit].sum() <= MAX_AT_STAKE * earned.sum()]
    return [limit for limit in fit if limit < recording.longest][:MAX_LIMITS]


def _text(keys: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in keys.items())


def _as_dict(recording: Recording, model: WhatIf, found: list[Prediction]) -> dict[str, Any]:
    return {
        "recorded": {
            "steps": len(recording.steps),
            "samples": sum(len(group.samples) for group in recording.groups),
            "samples_left_out": recording.unknown,
            "keys": recording.keys,
            **_rounded(model.base),
        },
        "predictions": [
            {
                "keys": it.keys,
                "line": line(it),
                "step_change": round(it.change, 4),
                "interval": [round(x, 4) for x in it.interval],
            }
            | {"gpu_change": round(it.gpu_change, 4), "reward_at_stake": it.reward_at_stake}
            | _rounded(it.outcome)
            for it in found
        ],
    }


def _rounded(outcome: Outcome) -> dict[str, Any]:
    return {key: None if value is None else round(value, 4) for key, value in asdict(outcome).items()}
