"""What arrives when in one simulated run: the jobs of a trace with shapes, SLOs and phase times drawn from one seed.

Phase times: the paper's table 6 (RollMux, arXiv 2512.11306v2). The table names no model and no number of GPUs. Sizes
here are an assumption, stated in every result: small = 7B on 1 node a side, medium = 14B on 2, large = 32B on 4, with
the paper's switch times (figure 4), host memory (table 2) and sync (figure 12, by our link model). These counts
reproduce the magnitude of its figure 15 (see research/paper). Called by simulate.py and bench/scheduler.py; reads CSV files.
"""

from __future__ import annotations

import csv
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import TypeVar

import msgspec

from verl_mux.errors import UserError
from verl_mux.placement.estimator import LinkModel
from verl_mux.placement.model import Estimate, JobSpec

T = TypeVar("T", int, float)

COLUMNS = ("job", "arrival_h", "duration_h")
MAX_GPUS = 8192  # of one job on each side
MAX_HOURS = 1e5  # eleven years; every iteration of a job is replayed


class TraceRow(msgspec.Struct, frozen=True):
    """gpus: on each side; None where the trace does not say."""

    job: str
    arrival_h: float
    duration_h: float
    gpus: int | None = None


def packaged_trace() -> list[TraceRow]:
    """300 jobs of Philly."""
    with as_file(files("research.workload") / "data" / "philly_300.csv") as path:
        return read_trace(path)


def read_trace(path: str | Path) -> list[TraceRow]:
    """Rows in order of arrival. Columns other than `job,arrival_h,duration_h[,gpus]` are left aside. Raises UserError
    that names the line for anything malformed."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restkey="", strict=True)
            missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
            if missing:
                raise UserError(f"{path}: column {missing[0]!r} is missing; a trace has {','.join(COLUMNS)}[,gpus]")
            rows: dict[str, TraceRow] = {}
            for fields in reader:
                row = _row(path, reader.line_num, fields)
                if row.job in rows:
                    raise UserError(f"{path}, line {reader.line_num}: job {row.job!r} is there twice; job names are unique")
                rows[row.job] = row
    except OSError as error:
        raise UserError(f"cannot read trace {path}: {error.strerror}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a CSV file: {error}") from error
    if not rows:
        raise UserError(f"{path} has no jobs")
    return sorted(rows.values(), key=lambda row: row.arrival_h)


def _row(path: str | Path, line: int, fields: dict[str, str | None]) -> TraceRow:
    texts = {column: text for column, text in fields.items() if text is not None}
    if "" in fields or len(texts) < len(fields):
        raise UserError(f"{path}, line {line}: expected {len(fields) - ('' in fields)} fields, as in the first line")
    if not (name := texts["job"].strip()):
        raise UserError(f"{path}, line {line}: job has no name")

    def number(column: str, of: type[T], allowed: str, is_allowed: Callable[[T], bool]) -> T:
        try:
            if is_allowed(value := of(texts[column])):
                return value
        except ValueError:  # also for more digits than Python takes
            pass
        raise UserError(f"{path}, line {line}: {column} is {texts[column]!r}; a {allowed} is needed")

    most = f"at most {MAX_HOURS:g}"
    arrival_h = number("arrival_h", float, f"number of at least 0 and {most}", lambda hours: 0 <= hours <= MAX_HOURS)
    duration_h = number("duration_h", float, f"number above 0 and {most}", lambda hours: 0 < hours <= MAX_HOURS)
    if not texts.get("gpus", "").strip():
        return TraceRow(name, arrival_h, duration_h)
    gpus = number("gpus", int, f"whole number from 1 to {MAX_GPUS}", lambda count: 0 < count <= MAX_GPUS)
    return TraceRow(name, arrival_h, duration_h, gpus)


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
SHAPE_COLUMNS = ("size", "rollout_min_s", "rollout_max_s", "train_min_s", "train_max_s")


def find_shapes(name: str) -> Sequence[Shape]:
    """A family by name, or the shapes in a CSV file. Raises UserError for neither."""
    if name in FAMILIES:
        return FAMILIES[name]
    if not Path(name).is_file():
        raise UserError(
            f"shapes {name!r} are not known; allowed: {', '.join(FAMILIES)}, or a CSV file of {','.join(SHAPE_COLUMNS)}"
        )
    try:
        with open(name, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            shapes = [_shape(name, reader.line_num, fields) for fields in reader]
    except OSError as error:
        raise UserError(f"cannot read shapes {name}: {error.strerror}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{name} is not a CSV file: {error}") from error
    if not shapes:
        raise UserError(f"{name} has no shapes; a CSV file of {','.join(SHAPE_COLUMNS)} is needed")
    return shapes


def _shape(path: str, line: int, fields: dict[str, str | None]) -> Shape:
    try:
        size, *bounds = (text.strip() for column in SHAPE_COLUMNS if (text := fields[column]) is not None)
        low, high, train_low, train_high = map(float, bounds)
    except (KeyError, ValueError) as error:
        raise UserError(f"{path}, line {line}: a shape needs {','.join(SHAPE_COLUMNS)}, the last four in seconds") from error
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


# Nodes a side where the trace does not say how many GPUs a job has: an assumption, see shapes.py.
NODES = {"small": 1, "medium": 2, "large": 4}
GPUS_PER_NODE = 8


class Phases:
    """The real seconds of a job's phases, iteration by iteration; without surprises they are the estimates.

    solo_s: what the iterations drawn so far would have taken alone."""

    def __init__(self, job: JobSpec, draws: Iterator[tuple[float, float]] | None = None) -> None:
        self.job = job
        self.draws = draws or itertools.repeat((job.rollout.seconds, job.train.seconds))
        self.history: list[tuple[float, float]] = []
        self._alone_s = [0.0]

    def times(self) -> tuple[Iterator[float], Iterator[float], Iterator[float]]:
        """Endless seconds of ROLLOUT (sync included), TAIL and TRAIN."""
        return self._rollouts(), itertools.repeat(self.job.tail_s), self._trains()

    def _rollouts(self) -> Iterator[float]:
        for rollout, train in self.draws:
            self.history.append((rollout, train))
            self._alone_s.append(self._alone_s[-1] + rollout + train)
            yield self.job.sync_s + rollout - self.job.tail_s

    def _trains(self) -> Iterator[float]:
        while True:
            yield self.history[-1][1]

    def solo_s(self, iterations: int) -> float:
        """What the first `iterations` would have taken alone."""
        return self._alone_s[iterations] + iterations * self.job.sync_s

    def begin_after(self, iterations: int) -> None:
        """The first `iterations` are done."""
        for _ in itertools.islice(self._rollouts(), iterations):
            pass

    def forget(self, iterations: int) -> None:
        """What was drawn beyond the first `iterations` is thrown away."""
        del self.history[iterations:], self._alone_s[iterations + 1 :]


class Arrival(msgspec.Struct, frozen=True):
    """job: as it is announced. iterations: how many it runs; says: how many it says that it will, None: it does not. draws: its
    real phase times, None for the estimates. profile_s, profiled: how long it has run before on nodes of its own, to be looked
    at, and how many iterations it did there."""

    job: JobSpec
    at_s: float
    iterations: int
    draws: Callable[[], Iterator[tuple[float, float]]] | None = None
    profile_s: float = 0.0
    profiled: int = 0
    says: int | None = None

    def says_left(self, done: int) -> int | None:
        """Iterations that it says are left when it has done `done`."""
        return None if self.says is None else max(self.says - done, 0)


def parse_slo(spec: str) -> tuple[float, float]:
    """`uniform:1,2` or a number: the range that SLOs are drawn from evenly. Raises UserError."""
    kind, _, bounds = spec.rpartition(":")
    try:
        found = [float(bound) for bound in bounds.split(",")]
    except ValueError:
        found = []
    if kind not in ("", "uniform") or len(found) != (2 if kind else 1):
        raise UserError(f"SLO {spec!r} is not understood; give a number of at least 1, or uniform:LOW,HIGH")
    low, high = found[0], found[-1]
    if not (1 <= low <= high < math.inf):
        raise UserError(f"SLO {spec!r} is out of range; an SLO is a factor of at least 1, and LOW is not above HIGH")
    return low, high


def draw_workload(rows: Sequence[TraceRow], shapes: Sequence[Shape], slo: tuple[float, float], seed: int) -> list[Arrival]:
    """One job per row. A job runs as many whole iterations as its duration alone holds, at least one."""
    rng = random.Random(seed)
    return [_arrival(row, rng.choice(shapes), rng.uniform(*slo), rng) for row in rows]


def _arrival(row: TraceRow, shape: Shape, slo: float, rng: random.Random) -> Arrival:
    nodes = NODES[shape.size] if row.gpus is None else math.ceil(row.gpus / GPUS_PER_NODE)
    job = draw_job(row.job, shape, nodes, GPUS_PER_NODE, slo, rng)
    iterations = max(1, round(row.duration_h * 3600 / job.iteration_s))
    return Arrival(job, row.arrival_h * 3600, iterations)
