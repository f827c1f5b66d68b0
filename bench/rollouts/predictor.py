"""`verl-mux bench predictor`: length predictors on a file; each epoch is ordered by what the earlier epochs teach.

Time ratios come from the list-scheduling simulation below on the last epoch, against FIFO. FIFO is the mean
over random arrival orders, because one order's makespan is luck; scores that tie are served as they arrived. Runs on
the command line; pure but for the file.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.progress import track

from bench.measuring import AsJson, show
from verl_mux.errors import UserError
from verl_mux.rollout.control.launch_order import turns
from verl_mux.rollout.lengths.predictors import LengthPredictor, LengthRow, Prompt, make_predictor

MEASURED = ("fifo", "oracle", "history", "default", "heuristic")
_ARRIVALS = 20
_SIMULATED_REQUESTS = 200_000


# A row of the file.
_SHAPE = '{"id": text or number, "prompt": text or chat messages, "epoch": integer, "length": integer of 0 or more}'


def bench_predictor(
    file: Annotated[Path, typer.Argument(help="JSON lines: id, prompt, epoch, length.", show_default=False)],
    json: AsJson = False,
    predictor: Annotated[list[str] | None, typer.Option(help="Measure only this one; may be repeated.")] = None,
    slots: Annotated[int, typer.Option(help="Requests that run at once in the simulated engine.", min=1)] = 64,
) -> None:
    """Order each epoch by what the earlier ones teach, and say how good the order is."""
    unknown = [name for name in predictor or () if name not in MEASURED]
    if unknown:
        raise UserError(f"--predictor {unknown[0]}: not a predictor this can measure; allowed: {', '.join(MEASURED)}")
    show(measure(read_rows(file), names=predictor or MEASURED, slots=slots), json, _table)


def _table(results: dict[str, dict[str, Any]]) -> str:
    head = f"{'predictor':<14} {'tau':>6} {'sjf mean':>9} {'ljf makespan':>13}  tau by epoch"
    lines = [
        f"{name:<14} {r['kendall_tau']:>6.3f} {r['sjf_mean_completion_ratio']:>9.3f} "
        f"{r['ljf_makespan_ratio']:>13.3f}  {' '.join(f'{tau:.3f}' for tau in r['kendall_tau_by_epoch'])}"
        for name, r in results.items()
    ]
    return "\n".join([head, *lines])


class _Message(msgspec.Struct):
    content: str


class _Row(msgspec.Struct):
    id: str | int
    prompt: str | list[_Message]
    epoch: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
    length: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


def read_rows(file: Path) -> list[LengthRow]:
    """Epochs ascending and otherwise in file order. Several rows of one id and epoch are samples of one prompt group.

    Raises:
        UserError: no such file, no row, or a bad line.
    """
    try:
        lines = [(number, line) for number, line in enumerate(file.read_bytes().splitlines(), 1) if line.strip()]
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    if not lines:
        raise UserError(f"{file} holds no row; a row is {_SHAPE}")
    rows = list[LengthRow]()
    for number, line in lines:
        try:
            row = msgspec.json.decode(line, type=_Row, strict=False)  # 5.0 is 5
        except msgspec.ValidationError as error:
            given = line[:80].decode(errors="replace")
            raise UserError(f"{file} line {number}: {error}, given {given}; a row is {_SHAPE}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UserError(f"{file} line {number}: not JSON: {error}") from None
        text = row.prompt if isinstance(row.prompt, str) else "\n".join(message.content for message in row.prompt)
        rows.append(LengthRow(Prompt(str(row.id), text), row.epoch, row.length))
    return sorted(rows, key=lambda row: row.epoch)


class Oracle:
    """Knows the answers: `reveal` is called with the lengths to come."""

    def __init__(self) -> None:
        self._lengths = np.zeros(0)

    def reveal(self, lengths: Sequence[int]) -> None:
        """Lengths of the prompts that the next `predict` is asked for, in that order."""
        self._lengths = np.array(lengths, dtype=np.float64)

    def observe(self, rows: Sequence[LengthRow]) -> None:
        """Nothing to learn."""

    def predict(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """Tokens, (prompts,). Raises ValueError: not the prompts that were revealed."""
        if len(prompts) != len(self._lengths):
            raise ValueError(f"{len(self._lengths)} lengths were revealed, and {len(prompts)} are asked for")
        return self._lengths


def kendall_tau(scores: np.ndarray, lengths: np.ndarray) -> float:
    """Kendall's tau-b of two (n,) arrays, in [-1, 1]. 0 where one of them is constant: such an order says nothing."""
    from scipy.stats import kendalltau

    if len(scores) < 2 or np.ptp(scores) == 0 or np.ptp(lengths) == 0:
        return 0.0
    return float(kendalltau(scores, lengths).statistic)


@dataclass(slots=True)
class _Record:
    predictor: LengthPredictor
    taus: list[float] = field(default_factory=list)
    sjf: float = 0.0
    ljf: float = 0.0


def measure(rows: Sequence[LengthRow], *, names: Sequence[str], slots: int) -> dict[str, dict[str, Any]]:
    """{predictor: figures}. rows: epochs ascending."""
    records = {name: _Record(Oracle() if name == "oracle" else make_predictor(name)) for name in names}
    epochs = [list(group) for _, group in groupby(rows, key=lambda row: row.epoch)]
    for epoch in track(epochs, "epochs", console=Console(stderr=True), disable=not sys.stderr.isatty()):
        arrivals = _Arrivals([row.length for row in epoch], slots)
        for record in records.values():
            _order(record, epoch, arrivals)
            record.predictor.observe(epoch)
    return {name: _figures(record) for name, record in records.items()}


class _Arrivals:
    """One epoch's requests in random orders of arrival, and FIFO's mean completion and makespan over them."""

    def __init__(self, lengths: Sequence[int], slots: int) -> None:
        self._lengths, self._slots = np.array(lengths, dtype=np.float64), slots
        random = np.random.default_rng(0)
        times = max(3, min(_ARRIVALS, _SIMULATED_REQUESTS // len(lengths)))
        self._orders = [random.permutation(len(lengths)) for _ in range(times)]
        self._fifo = self._mean("fifo", np.zeros(len(lengths)))

    def ratio(self, order: str, scores: np.ndarray) -> tuple[float, float]:
        """(mean completion, makespan) as a share of FIFO's; 1 where FIFO takes no time at all."""
        mean, makespan = self._mean(order, scores)
        return mean / (self._fifo[0] or 1.0), makespan / (self._fifo[1] or 1.0)

    def _mean(self, order: str, scores: np.ndarray) -> tuple[float, float]:
        # Without ties the arrival order changes nothing, and one run is all.
        orders = self._orders if len(np.unique(scores)) < len(scores) else self._orders[:1]
        runs = [simulate(self._lengths[o].tolist(), turns(order, scores[o]), self._slots) for o in orders]
        mean, makespan = np.mean(runs, axis=0)
        return float(mean), float(makespan)


def _order(record: _Record, epoch: Sequence[LengthRow], arrivals: _Arrivals) -> None:
    if isinstance(record.predictor, Oracle):
        record.predictor.reveal([row.length for row in epoch])
    scores = record.predictor.predict([row.prompt for row in epoch])
    record.taus.append(kendall_tau(scores, np.array([row.length for row in epoch])))
    record.sjf = arrivals.ratio("sjf", scores)[0]
    record.ljf = arrivals.ratio("ljf", scores)[1]


def _figures(record: _Record) -> dict[str, Any]:
    return {
        "kendall_tau": record.taus[-1],
        "kendall_tau_by_epoch": record.taus,
        "sjf_mean_completion_ratio": record.sjf,
        "ljf_makespan_ratio": record.ljf,
    }


def simulate(lengths: Sequence[float], turns: np.ndarray, slots: int) -> tuple[float, float]:
    """(mean completion, makespan) when the next response takes the first free of `slots`, in units of `lengths`.

    A token takes the same time everywhere and whatever else runs: a bound on what ordering gains, not a forecast.
    """
    free = [0.0] * slots
    total = last = 0.0
    for index in np.argsort(turns, kind="stable").tolist():
        done = free[0] + float(lengths[index])
        heapq.heapreplace(free, done)
        total, last = total + done, max(last, done)
    return total / max(1, len(lengths)), last
