"""R1-R4: the schedules of figures 3 and 10, their cost efficiency, and what cold starts would do to them.

Phase times are the means of the bars in the paper's vector figures (data/fig10*.csv, first rollouts included); switch
times are those of its figure 4 and syncs those of our link model, so a bar that already holds its switch counts it
twice: the `without switch and sync` rows bound that. Periods come from the same code that places jobs.
"""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import fmean, pstdev

import msgspec

from research.paper.figure import Figure
from research.paper.testbed import make_job
from verl_mux.placement.group_run import group_periods
from verl_mux.placement.groups import isolated_usd
from verl_mux.placement.model import TESTBED, Group, JobSpec, Pin

DATA = Path(__file__).parent / "data"


class Case:
    """One panel of figure 10, with the nodes of each job. jobs: bar name -> (type, model, rollout nodes, training nodes)."""

    def __init__(self, panel: str, jobs: dict[str, tuple[str, str, tuple[str, ...], tuple[str, ...]]]) -> None:
        self.panel = panel
        self.jobs = jobs
        self.bars = read_bars(DATA / f"fig10{panel}.csv")

    def seconds(self, job: str, phase: str) -> float:
        return fmean(end - start for start, end in self.bars[job, phase])

    def measured_period(self, job: str) -> float:
        """Mean time from one start of its training to the next."""
        starts = [start for start, _ in self.bars[job, "train"]]
        return (starts[-1] - starts[0]) / (len(starts) - 1)

    def group(self, cold: bool = False, free: bool = False) -> Group:
        specs = {
            job: make_job(job, model, self.seconds(job, "roll"), self.seconds(job, "train"), (len(r), len(t)), cold, free)
            for job, (_, model, r, t) in self.jobs.items()
        }
        return grouped({job: (specs[job], r, t) for job, (_, _, r, t) in self.jobs.items()})

    def speed(self) -> float:
        """Throughput over that of the job alone, the mean of all jobs."""
        group = self.group()
        periods = group_periods(group)
        return fmean(job.iteration_s / periods[job.name] for job in group.jobs)

    def alone(self, wide: bool = False) -> list[JobSpec]:
        """On nodes of their own. Table 3 gives D jobs 8 H800, section 7.2 says 16 for panel c (`wide`)."""
        train = [2 if kind == "C" or wide else 1 for kind, *_ in self.jobs.values()]
        return [msgspec.structs.replace(job, train_nodes=n) for job, n in zip(self.group().jobs, train, strict=True)]


def read_bars(path: Path) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """(job, `roll` or `train`) -> (start, end) of its bars in seconds."""
    bars: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            job, _, phase = row["job_phase"].partition("-")
            bars.setdefault((job, phase), []).append((float(row["start_s"]), float(row["end_s"])))
    return bars


def grouped(pinned: dict[str, tuple[JobSpec, tuple[str, ...], tuple[str, ...]]]) -> Group:
    """A co-execution group over all nodes named."""
    pins = tuple(Pin(job=job, rollout=rollout, train=train) for job, rollout, train in pinned.values())
    rollout_nodes = tuple(dict.fromkeys(node for pin in pins for node in pin.rollout))
    train_nodes = tuple(dict.fromkeys(node for pin in pins for node in pin.train))
    return Group(name="g", pins=pins, rollout_nodes=rollout_nodes, train_nodes=train_nodes)


H, T = ("r1", "r2", "r3"), ("t1", "t2")
CASES = {
    "a": Case("a", {"j1": ("A", "7B", H[:1], T[:1]), "j2": ("A", "7B", H[:1], T[:1])}),
    "b": Case("b", {"j1": ("D", "8B", H[2:], T[:1]), "j2": ("D", "8B", H[1:2], T[:1]), "j3": ("E", "14B", H[:1], T[:1])}),
    "c": Case("c", {"j1": ("C", "32B", H[1:], T), "j2": ("D", "8B", H[2:], T), "j3": ("D", "8B", H[1:2], T)}),
}


def periods_of_figure_10() -> list[Figure]:
    """R1."""
    found = []
    for case in CASES.values():
        planned, free = group_periods(case.group()), group_periods(case.group(free=True))
        for job, (kind, *_) in case.jobs.items():
            name = f"fig. 10{case.panel} period of {job} (type {kind})"
            measured, remark = case.measured_period(job), _spread(case, job)
            found.append(Figure(claim="R1", name=name, paper=measured, ours=planned[job], unit="s", within=0.05, remark=remark))
            without = f"{name}, without switch and sync"
            found.append(Figure(claim="R1", name=without, paper=measured, ours=free[job], unit="s"))
    return found


def _spread(case: Case, job: str) -> str:
    seconds = [end - start for start, end in case.bars[job, "roll"]]
    return f"mean of the drawn rollouts {fmean(seconds):.0f} s, standard deviation {pstdev(seconds):.0f} s"


FIGURE_3 = {"J1": ("4B", 262.3, 86.7), "J2": ("8B", 310.0, 120.5)}


def figure_3(free: bool = False) -> Group:
    """Two jobs share one rollout node; each trains on a node of its own."""
    jobs = {name: make_job(name, *job, free=free) for name, job in FIGURE_3.items()}
    return grouped({name: (job, ("r1",), (f"t {name}",)) for name, job in jobs.items()})


def interference() -> list[Figure]:
    """R2."""
    period = group_periods(figure_3())["J1"]
    free = group_periods(figure_3(free=True))["J1"]
    solo = {name: rollout + train for name, (_, rollout, train) in FIGURE_3.items()}
    remark = "the paper prints 1.40x and 1.64x; 573 s is the common period of its plot, 1.64x and 1.33x of the jobs alone"
    return [
        Figure(claim="R2", name="fig. 3 common period", paper=573.0, ours=period, unit="s", within=0.05, remark=remark),
        Figure(claim="R2", name="fig. 3, without switch and sync", paper=573.0, ours=free, unit="s"),
        Figure(claim="R2", name="slowdown of J1", paper=1.64, ours=period / solo["J1"], unit="x"),
        Figure(claim="R2", name="slowdown of J2", paper=1.40, ours=period / solo["J2"], unit="x", remark="its plot shows 1.33x"),
    ]


# Figure 10's bars, and table 4's throughput of RollMux over solo.
PRINTED = {"a": (1.82, 0.98), "b": (2.04, 0.95), "c": (2.11, 0.91)}


def cost_efficiency() -> list[Figure]:
    """R3: throughput per USD over that of each job on nodes of its own."""
    found = []
    for panel, (efficiency, throughput) in PRINTED.items():
        case = CASES[panel]
        speed, usd = case.speed(), case.group().usd_per_hour(TESTBED)
        name = f"fig. 10{panel} cost efficiency over solo"
        for label, wide in (("", False), (", a D job alone on 16 H800", True)) if panel == "c" else (("", False),):
            ratio = sum(isolated_usd(job, TESTBED) for job in case.alone(wide)) / usd
            remark = f"cost ratio {ratio:.2f}; table 4's throughput would give {ratio * throughput:.2f}"
            found.append(
                Figure(
                    claim="R3",
                    name=name + label,
                    paper=efficiency,
                    ours=ratio * speed,
                    unit="x",
                    within=0.10,
                    basis="assumed" if wide else "",
                    remark=remark,
                )
            )
    return found


def cold_starts() -> list[Figure]:
    """R4: throughput lost when every switch is a cold start, two jobs of figure 2's single-turn workloads on 1 + 1 nodes."""
    found = []
    for model, phases in (("7B", (80.0, 77.0)), ("7B", (134.0, 113.0)), ("14B", (238.0, 197.0)), ("32B", (267.0, 271.0))):
        warm, cold = (_pair_period(model, phases, cold) for cold in (False, True))
        name = f"throughput lost to cold starts, {model} with {phases[0]:.0f} + {phases[1]:.0f} s"
        remark = "the paper gives only the highest, for a workload it does not name" if not found else ""
        found.append(
            Figure(claim="R4", name=name, paper=None if found else 45.0, ours=100 * (1 - warm / cold), unit="%", remark=remark)
        )
    return found


def _pair_period(model: str, phases: tuple[float, float], cold: bool) -> float:
    jobs = {name: make_job(name, model, *phases, cold=cold) for name in ("x", "y")}
    return group_periods(grouped({name: (job, ("r1",), ("t1",)) for name, job in jobs.items()}))["x"]
