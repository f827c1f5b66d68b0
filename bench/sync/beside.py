"""verl's own checkpoint engines and ours, in turns, on the same model in the same processes."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

import psutil

from bench.measuring import answer_of
from verl_mux.errors import Failure, UserError

SYNC_ROUNDS = "bench.sync_rounds"
_WITHIN_S = 900.0
# The model, as trainers hold it, in one region and in two engines a rank, and what passes through a file.
_COPIES, _COPIES_A_RANK, _RESERVE = 3, 5, 3 << 30


def beside_verl(model_bytes: int, ranks: int) -> dict[str, Any]:
    """seconds: medians of the syncs of verl's engine and of ours; ratio: ours over its. By name of the engine; why_not: of one
    that does not run here, which has none of the others.

    Raises:
        UserError: there is not enough memory.
        Failure: nothing could be asked.
    """
    needed = model_bytes * (_COPIES + _COPIES_A_RANK * ranks) + _RESERVE
    if (free := psutil.virtual_memory().available) < needed:
        raise UserError(f"{model_bytes} bytes with {ranks} ranks need about {needed} bytes of memory, and {free} are free")
    return {"ranks": ranks, "beside": {name: _one(name, lacks, model_bytes, ranks) for name, lacks in _ask().items()}}


def _one(name: str, lacks: str | None, model_bytes: int, ranks: int) -> dict[str, Any]:
    if lacks is not None:
        return {"why_not": lacks}
    try:
        return compared(_ask(name, f"--model-bytes={model_bytes}", f"--ranks={ranks}"))
    except Failure as error:
        return {"why_not": str(error)}


def compared(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Of engines that load a tensor as it comes; `by_engine`: of those that load as engines without a GPU do.
    model_bytes: of the model that came nearest to what was asked for."""
    memory, engine = (_medians(answer["ways"][way]) for way in ("memory", "engine"))
    return {**memory, "bit_equal": answer["bit_equal"], "model_bytes": answer["model_bytes"], "by_engine": engine}


def _medians(took: Mapping[str, list[float]]) -> dict[str, Any]:
    theirs, ours = median(took["theirs"]), median(took["ours"])
    return {"seconds": theirs, "ours_seconds": ours, "ratio": ours / theirs, "each": took["theirs"], "ours_each": took["ours"]}


def _ask(*arguments: str) -> dict[str, Any]:
    # As a job's processes; Ray's own choice is to stand back behind all others.
    environment = {"VERL_PLATFORM": "cpu", "RAY_worker_niceness": "0"}
    return answer_of(SYNC_ROUNDS, *arguments, within_s=_WITHIN_S, what="it", **environment)


def in_words(found: Mapping[str, Any]) -> str:
    """A line an engine and way."""
    text = []
    for name, it in found["beside"].items():
        if "why_not" in it:
            text.append(f"{name}: does not run here: {it['why_not']}")
            continue
        same = "" if it["bit_equal"] else ", WRONG WEIGHTS"
        for way, its in (("", it), (" by an engine", it["by_engine"])):
            text.append(f"{name}{way}: {its['seconds']:.3f} s, ours {its['ours_seconds']:.3f} s, {its['ratio']:.2f} of it{same}")
    return "\n".join(text)
