"""verl's metrics of a step, as its console prints them (`step:3 - timing_s/gen:12.5 - ...`) or as a wandb history has them (a
JSON object a line, with `_timestamp`). Each `timing_s/<part>` becomes an event of the trainer. The console says no time of
day: its steps follow each other from the epoch on. Runs on the command line; called by foreign.py; pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from verl_mux.profiling.eventlog import events
from verl_mux.profiling.plain.lines import MAX_STEP
from verl_mux.profiling.report.formats.log_line import log_line

_STEP = re.compile(r"(?:^|\s)step:(\d{1,9}) - (.*)")
# In the order in which a step does them; verl's names, and ours. Others keep theirs, behind these.
_PARTS = {
    "gen": events.GENERATE_PHASE, "reward": "reward", "old_log_prob": events.OLD_LOG_PROB, "ref": events.REF,
    "values": events.VALUES, "adv": events.ADV, "update_critic": events.UPDATE_CRITIC, "update_actor": events.UPDATE_ACTOR,
    "update_weights": events.SYNC,
    "sync_rollout_weights": events.SYNC, "param_sync": events.SYNC, "save_checkpoint": events.SAVE_CHECKPOINT,
    "testing": events.VALIDATE,
}  # fmt: skip
_INSIDE_OTHERS = {"generate_async", "wait_for_enough_samples", "start_profile", "stop_profile", "step"}
_PREFIX = "timing_s/"


class Clock:
    """Where a file's steps have come to, in seconds since the epoch."""

    def __init__(self) -> None:
        self.at = 0.0

    def lines(self, text: str) -> Iterator[dict[str, Any]]:
        """The events of a line; none where it is no line of metrics."""
        figures = _figures(text)
        timed = {key[len(_PREFIX) :]: value for key, value in figures.items() if key.startswith(_PREFIX)}
        if not timed or not 0 <= (step := int(figures.get("training/global_step", figures.get("step", -1)))) <= MAX_STEP:
            return
        parts = sorted(
            (part for part in timed if "/" not in part and part not in _INSIDE_OTHERS),
            key=lambda part: list(_PARTS).index(part) if part in _PARTS else len(_PARTS),
        )
        whole = timed.get("step", sum(timed[part] for part in parts))
        ended = float(figures.get("_timestamp", self.at + whole))
        at = ended - whole
        for part in parts:
            at += timed[part]
            yield log_line(_when(min(at, ended)), _PARTS.get(part, part), timed[part], {}, step, "trainer")
        about = {"reward": figures.get("critic/score/mean"), "response_length": figures.get("response_length/mean")}
        known = {key: value for key, value in about.items() if value is not None}
        yield log_line(_when(ended), events.STEP, whole, known, step, "trainer")
        self.at = ended


def _when(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, tz=timezone.utc)


def _figures(text: str) -> dict[str, float]:
    if text.lstrip()[:1] == "{":
        try:
            logged = json.loads(text)
        except (ValueError, RecursionError):
            return {}
        known = logged if isinstance(logged, dict) else {}
        figures = {key: float(value) for key, value in known.items() if isinstance(value, (int, float))}
        return figures | ({"step": figures["_step"]} if "_step" in figures else {})
    if (found := _STEP.search(text)) is None:
        return {}
    figures = {"step": float(found[1])}
    for item in found[2].split(" - "):
        key, _, value = item.strip().rpartition(":")
        value = value.removeprefix("np.float64(").removesuffix(")")
        if key and re.fullmatch(r"-?\d+(\.\d*)?(e[+-]?\d+)?", value):
            figures[key] = float(value)
    return figures
