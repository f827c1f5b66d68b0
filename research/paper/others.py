"""R6, R11, R13, R14: the syncs of figure 12, theorem 1, table 4, and the other systems of figure 10.

Called by __main__.py; pure."""

from __future__ import annotations

import random
from statistics import fmean

import msgspec

from research.fluid import colocated, gavel
from research.paper.figure import Figure
from research.paper.schedules import CASES, Case
from research.paper.testbed import WEIGHTS_GB
from verl_mux.placement.estimator import LinkModel
from verl_mux.placement.group_run import planned_run, settle
from verl_mux.placement.groups import isolated_usd
from verl_mux.placement.model import TESTBED, Estimate, JobSpec

# GB/s of one stream, when every rollout GPU fetches a whole copy over a stream of its own (veRL's way).
PULL = 16.0 / 8
# Seconds, as printed: (GPUs a side, model) -> (veRL, RollMux).
BARS = {
    (8, "7B"): (7.5, 0.9),
    (8, "14B"): (13.8, 1.7),
    (8, "32B"): (30.7, 3.9),
    (16, "7B"): (8.2, 3.1),
    (16, "14B"): (15.2, 5.8),
    (16, "32B"): (33.8, 12.3),
}
# The stages of 14B's bars, read off the vector figure: both of 8 -> 8, and the broadcast of 16 -> 16 over two nodes.
SCATTER_S, BROADCAST_IN_S, BROADCAST_ACROSS_S = 1.54, 0.13, 5.03


def syncs() -> list[Figure]:
    """First with what all bars were fitted by, then with what those of 14B say."""
    weights = WEIGHTS_GB["14B"]
    link = LinkModel(
        scatter=weights / (8 * SCATTER_S),
        broadcast_in=weights / BROADCAST_IN_S,
        broadcast_across=weights / BROADCAST_ACROSS_S,
    )
    learnt = _bars(link, weights / BARS[8, "14B"][0], ["7B", "32B"])
    return [
        *(
            msgspec.structs.replace(figure, within=0.10, basis="fitted")
            for figure in _bars(LinkModel(), PULL, ["7B", "14B", "32B"])
        ),
        *(msgspec.structs.replace(figure, name=f"{figure.name}, from 14B's bars") for figure in learnt),
    ]


def _bars(link: LinkModel, pull: float, models: list[str]) -> list[Figure]:
    """pull: GB/s of one stream, in veRL's way."""
    found = []
    for (gpus, model), printed in BARS.items():
        if model in models:
            seconds = WEIGHTS_GB[model] / pull, link.two_stage_s(WEIGHTS_GB[model], gpus, gpus // 8)
            for system, paper, ours in zip(("veRL", "RollMux"), printed, seconds, strict=True):
                name = f"sync {model}, {gpus} -> {gpus} GPUs, {system}"
                found.append(Figure(claim="R6", name=name, paper=paper, ours=ours, unit="s"))
    return found


GROUPS = 10_000


def draw_group(rng: random.Random, rollout_nodes: int) -> tuple[list[JobSpec], list[int]] | None:
    """Two to five jobs, each on one of the rollout nodes (as bits) and all on one training node; None where T_load is not
    below T_cycle."""
    count = rng.randint(2, 5)
    jobs = [_job(i, rng.uniform(1, 100), rng.uniform(1, 100)) for i in range(count)]
    on = [1 << rng.randrange(rollout_nodes) for _ in jobs]
    load = max(
        sum(j.train.seconds for j in jobs), *(sum(j.rollout.seconds for j, o in zip(jobs, on, strict=True) if o == n) for n in on)
    )
    return (jobs, on) if load < max(job.iteration_s for job in jobs) else None


def _job(number: int, rollout_s: float, train_s: float) -> JobSpec:
    return JobSpec(name=f"j{number}", rollout=Estimate(seconds=rollout_s), train=Estimate(seconds=train_s))


def slowest(jobs: list[JobSpec], on: list[int]) -> float:
    """The longest settled period over T_cycle, from the events."""
    settled = settle(planned_run(jobs, on, [1 << 8] * len(jobs), "fifo"))
    return max(settled) / max(job.iteration_s for job in jobs)


def violations(rollout_nodes: int, groups: int = GROUPS) -> tuple[int, float, str]:
    """(groups of which a job needs longer than T_cycle, the worst ratio, the smallest such group in words)."""
    rng, found, worst, example = random.Random(11), [], 1.0, ""
    checked = 0
    while checked < groups:
        if not (drawn := draw_group(rng, rollout_nodes)):
            continue
        checked += 1
        if (ratio := slowest(*drawn)) > 1 + 1e-6:
            found.append(drawn)
            worst = max(worst, ratio)
    if found:
        jobs, on = min(found, key=lambda drawn: (len(drawn[0]), -slowest(*drawn)))
        example = _in_words(jobs, on)
    return len(found), worst, example


def _in_words(jobs: list[JobSpec], on: list[int]) -> str:
    each = (f"{j.rollout.seconds:.0f}+{j.train.seconds:.0f} s on r{o.bit_length()}" for j, o in zip(jobs, on, strict=True))
    return f"e.g. {', '.join(each)}: {slowest(jobs, on):.2f} T_cycle"


def theorem_1() -> list[Figure]:
    """How many of 10,000 random unsaturated groups break it."""
    one, _, _ = violations(1)
    two, worst, example = violations(2)
    return [
        Figure(claim="R11", name="1 rollout node: groups slower than T_cycle, of 10,000", paper=0.0, ours=one),
        Figure(
            claim="R11", name="2 rollout nodes: groups slower than T_cycle, of 10,000", paper=0.0, ours=two,
            remark=f"the paper proves one node and asserts the rest; {example}",
        ),
        Figure(claim="R11", name="2 rollout nodes: slowest job of all", paper=None, ours=worst, unit="T_cycle"),
    ]  # fmt: skip


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
