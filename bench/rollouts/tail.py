"""`verl-mux bench tail`: the state machines of rollout control over recorded lengths, in virtual time. No engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from verl_mux.errors import UserError


def bench_tail(
    files: Annotated[
        list[Path], typer.Argument(help="JSON lines: id, prompt, epoch, length. One file a job.", show_default=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    mode: Annotated[
        list[str] | None, typer.Option(help="Replay this mode beside `sync`; may be repeated. Default: seven.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Prompt groups a step.", min=1)] = 8,
    slots: Annotated[int, typer.Option(help="Requests that one replica runs at once.", min=1)] = 64,
    step_ms: Annotated[float, typer.Option(help="Milliseconds of a decoding step.", min=0)] = 4.0,
    request_ms: Annotated[float, typer.Option(help="Milliseconds that each request adds to one.", min=0)] = 0.1,
    prefill_us: Annotated[float, typer.Option(help="Microseconds a token that is read again.", min=0)] = 20.0,
    train_us: Annotated[float, typer.Option(help="Microseconds a trained token; for defer_shared.", min=0)] = 400.0,
    rate: Annotated[float, typer.Option(help="Over-sampling rate.", min=0)] = 1.0,
    window: Annotated[int | None, typer.Option(help="Steps whose prompts `defer` gathers. Default: an epoch.", min=1)] = None,
    max_mean: Annotated[
        float, typer.Option(help="Most that a round's mean length may be expected to be, over its epoch's.", min=1.01)
    ] = 2.0,
    predictor: Annotated[str, typer.Option(help="What `defer` orders prompts by that have no past.")] = "default",
    skip_bad: Annotated[bool, typer.Option(help="Leave bad lines out, counted, instead of refusing the file.")] = False,
) -> None:
    """Time of the rollouts, lengths, lag and waste of each mode beside `sync`, and what an oracle of lengths would win."""
    from research.rollouts.bed import Bed
    from research.rollouts.modes import ALL_MODES, BASE, DEFAULT_MODES, Figures, Setting, measure
    from verl_mux.rollout.lengths.file import read_rows

    chosen = list(dict.fromkeys(mode or DEFAULT_MODES))
    if unknown := [name for name in chosen if name not in ALL_MODES]:
        raise UserError(f"--mode {unknown[0]}: not a mode this can replay; allowed: {', '.join(ALL_MODES)}")
    if step_ms == 0 and request_ms == 0:
        raise UserError("--step-ms and --request-ms are both 0; allowed: a decoding step that takes time")
    rows = []
    for file in files:
        found, bad = read_rows(file, skip_bad=skip_bad)
        rows.append(found)
        if bad:
            print(f"verl-mux: {file}: {len(bad)} bad lines left out, the first: {bad[0]}", file=sys.stderr)
    bed = Bed(batch, slots, step_ms / 1e3, request_ms / 1e3, prefill_us / 1e6, train_us / 1e6, switch_s=0.02)
    print(bed.told(), file=sys.stderr)
    results = measure(rows, chosen, Setting(bed, rate=rate, window=window, max_mean=max_mean, predictor=predictor))
    base = results[BASE].seconds
    if as_json:
        print(json.dumps({"modes": {name: figures.as_dict(base) for name, figures in results.items()}}, indent=2))
        return

    def line(name: str, it: Figures) -> str:
        told = it.as_dict(base)
        return (
            f"{name:<20} {told['time_ratio_to_sync']:>8.3f} {it.length_ratio:>7.3f} {it.lag_mean:>6.2f} {it.lag_max:>4} "
            f"{it.stale_token_fraction:>6.1%} {it.wasted_token_fraction:>7.1%} {it.prompts_lost:>5} {it.largest_step_mean:>8.2f} "
            f"{it.steps_above:>6} {it.steps_above_later:>6} {it.steps:>6}"
        )

    print(
        f"{'mode':<20} {'to sync':>8} {'length':>7} {'lag':>6} {'max':>4} {'stale':>6} {'wasted':>7} {'lost':>5} {'mix':>8} "
        f"{'above':>6} {'later':>6} {'steps':>6}"
    )
    print("\n".join(line(name, figures) for name, figures in results.items()))
