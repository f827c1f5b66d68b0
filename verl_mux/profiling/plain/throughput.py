"""The headline figure of multiplexing, as `verl-mux run` and the report tell it. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def throughput_ratio(alone: Mapping[str, float | None], together: Mapping[str, float | None]) -> float | None:
    """Steps per second together over one after the other: sum(1 / together) / (jobs / sum(alone)).

    `alone`, `together`: seconds of a step by job. None where one of them was not measured.
    """
    alone_s = [period for period in alone.values() if period is not None]
    together_s = [period for period in together.values() if period is not None]
    if not alone or alone.keys() != together.keys() or len(alone_s) + len(together_s) < 2 * len(alone):
        return None
    return round(sum(1 / period for period in together_s) * sum(alone_s) / len(alone), 4)
