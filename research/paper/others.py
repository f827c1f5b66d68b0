"""R13 and R14: table 4, which holds the jobs of figure 10 against themselves alone and against an ideal, and the other systems of
figure 10. The phase times are those of R1."""

from __future__ import annotations

from statistics import fmean

from research.fluid import colocated
from research.fractions import gavel
from research.paper.figure import Figure
from research.paper.schedules import CASES, Case
from verl_mux.placement.layouts import isolated_usd
from verl_mux.placement.model import TESTBED

# Table 4: throughput over that of the jobs alone, of RollMux and of the ideal.
TABLE_4 = {"a": (0.98, 1.07), "b": (0.95, 1.07), "c": (0.91, 1.11)}
# Figure 10's bars, throughput per USD over that of the jobs alone: Gavel+ and veRL.
OTHERS = {"a": (1.17, 1.24), "b": (1.26, 1.57), "c": (1.14, 1.27)}


def interference() -> list[Figure]:
    """R13."""
    found = []
    for panel, (rollmux, ideal) in TABLE_4.items():
        case = CASES[panel]
        name = f"table 4, jobs of fig. 10{panel}: throughput over solo"
        remark = f"read off the bars of its figure 10: {_drawn_speed(case):.2f}"
        found.append(
            Figure(claim="R13", name=f"{name}, RollMux", paper=rollmux, ours=case.speed(), unit="x", within=0.05, remark=remark)
        )
        faster = fmean(job.iteration_s / (job.rollout.seconds + job.train.seconds) for job in case.alone())
        remark = "taken to be: no time for syncs, and a rollout as long on H800 as on H20"
        found.append(
            Figure(
                claim="R13",
                name=f"{name}, ideal",
                paper=ideal,
                ours=faster,
                unit="x",
                within=0.05,
                basis="assumed",
                remark=remark,
            )
        )
    return found


def _drawn_speed(case: Case) -> float:
    """The paper's own figure 10: phases of each job, syncs left out, over its period."""
    return fmean((case.seconds(job, "roll") + case.seconds(job, "train")) / case.measured_period(job) for job in case.jobs)


def other_systems() -> list[Figure]:
    """R14: USD of the same work. Under both each job is as fast as alone."""
    found = []
    for panel, printed in OTHERS.items():
        jobs = CASES[panel].alone()
        usd = sum(isolated_usd(job, TESTBED) for job in jobs)
        for system, hold, paper, remark in (
            (
                "Gavel+",
                gavel(TESTBED),
                printed[0],
                "taken to be: every job alone on the cheapest fractions of nodes of both kinds",
            ),
            ("veRL", colocated(TESTBED), printed[1], "taken to be: a rollout as long on H800 as on H20"),
        ):
            name = f"fig. 10{panel} cost efficiency over solo, {system}"
            ours = usd / hold({job.name: job for job in jobs}).usd_per_hour
            found.append(Figure(claim="R14", name=name, paper=paper, ours=ours, unit="x", basis="assumed", remark=remark))
    return found
