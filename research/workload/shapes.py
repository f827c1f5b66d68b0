"""Shapes of simulated jobs: the range their phase times are drawn from, and the size that goes with it.

Phase times: the paper's table 6 (RollMux, arXiv 2512.11306v2). The table names no model and no number of GPUs. Sizes
here are an assumption, stated in every result: small = 7B on 1 node a side, medium = 14B on 2, large = 32B on 4, with
the paper's switch times (figure 4), host memory (table 2) and sync (figure 12, by our link model). These counts
reproduce the magnitude of its figure 15 (see research/paper).
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from verl_mux.errors import UserError
from verl_mux.placement.estimator import LinkModel
from verl_mux.placement.model import Estimate, JobSpec


class Size(msgspec.Struct, frozen=True):
    """What a job of this size costs besides its phases: seconds, and GB of host memory per node of each side."""

    model: str
    weights_gb: float
    rollout_switch_s: float
    train_switch_s: float
    cold_start_s: float
    rollout_memory_gb: float
    train_memory_gb: float


SIZES = {
    "small": Size("7B", 15.2, 0.9, 4.1, 38.8, 275.7, 240.0),
    "medium": Size("14B", 29.5, 1.8, 4.7, 60.4, 445.4, 456.1),
    "large": Size("32B", 65.5, 1.7, 5.9, 81.7, 490.3, 520.4),
}


class Shape(msgspec.Struct, frozen=True):
    """Seconds of rollout and train are drawn evenly from these ranges."""

    size: str
    rollout: tuple[float, float]
    train: tuple[float, float]


BALANCED = (
    Shape("small", (50, 100), (50, 100)),
    Shape("medium", (100, 200), (100, 200)),
    Shape("large", (200, 300), (200, 300)),
)
ROLLOUT_HEAVY = (
    Shape("small", (100, 200), (25, 50)),
    Shape("medium", (200, 400), (50, 100)),
    Shape("large", (400, 600), (100, 200)),
)
TRAIN_HEAVY = tuple(Shape(shape.size, shape.train, shape.rollout) for shape in ROLLOUT_HEAVY)
FAMILIES = {
    "balanced": BALANCED,
    "rollout-heavy": ROLLOUT_HEAVY,
    "train-heavy": TRAIN_HEAVY,
    "mixed": (*BALANCED, *ROLLOUT_HEAVY, *TRAIN_HEAVY),
}
COLUMNS = ("size", "rollout_min_s", "rollout_max_s", "train_min_s", "train_max_s")


def find_shapes(name: str) -> Sequence[Shape]:
    """A family by name, or the shapes in a CSV file. Raises UserError for neither."""
    if name in FAMILIES:
        return FAMILIES[name]
    if not Path(name).is_file():
        raise UserError(f"shapes {name!r} are not known; allowed: {', '.join(FAMILIES)}, or a CSV file of {','.join(COLUMNS)}")
    try:
        with open(name, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            shapes = [_shape(name, reader.line_num, fields) for fields in reader]
    except OSError as error:
        raise UserError(f"cannot read shapes {name}: {error.strerror}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{name} is not a CSV file: {error}") from error
    if not shapes:
        raise UserError(f"{name} has no shapes; a CSV file of {','.join(COLUMNS)} is needed")
    return shapes


def _shape(path: str, line: int, fields: dict[str, str | None]) -> Shape:
    try:
        size, *bounds = (text.strip() for column in COLUMNS if (text := fields[column]) is not None)
        low, high, train_low, train_high = map(float, bounds)
    except (KeyError, ValueError) as error:
        raise UserError(f"{path}, line {line}: a shape needs {','.join(COLUMNS)}, the last four in seconds") from error
    if size not in SIZES:
        raise UserError(f"{path}, line {line}: size is {size!r}; allowed: {', '.join(SIZES)}")
    if not (0 < low <= high < math.inf and 0 < train_low <= train_high < math.inf):
        raise UserError(f"{path}, line {line}: seconds must be above 0 and finite, and no minimum above its maximum")
    return Shape(size, (low, high), (train_low, train_high))


def draw_job(name: str, shape: Shape, nodes: int, gpus_per_node: int, slo: float, rng: random.Random) -> JobSpec:
    """A job of this shape on `nodes` nodes of each side."""
    size = SIZES[shape.size]
    sync_s = LinkModel().two_stage_s(size.weights_gb, nodes * gpus_per_node, nodes)
    return JobSpec(
        name=name,
        rollout=Estimate(seconds=rng.uniform(*shape.rollout)),
        train=Estimate(seconds=rng.uniform(*shape.train)),
        sync_s=sync_s,
        rollout_switch_s=size.rollout_switch_s,
        train_switch_s=size.train_switch_s,
        cold_start_s=size.cold_start_s,
        rollout_nodes=nodes,
        train_nodes=nodes,
        rollout_memory_gb=size.rollout_memory_gb,
        train_memory_gb=size.train_memory_gb,
        slo=slo,
    )
