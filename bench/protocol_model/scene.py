"""What all schedules have in common: a coordinator with three nodes, jobs that join, time for faults, and the calm after it."""

from __future__ import annotations

from bench.protocol_model.coordinator import CoordinatorProcess, DieAt
from bench.protocol_model.job import JobProcess
from bench.protocol_model.world import World
from verl_mux.coordinator.core.settings import Config, Node, Pool, Segment

LEASE_S = 5.0
FAULTS_S = 60.0
_CALM_S = 900.0
_SCHEDULES = (
    [Segment(mode="interleaved")],
    [Segment(mode="interleaved")],
    [Segment(mode="sequential", steps=1), Segment(mode="interleaved")],
)
_SETS = ({"rollout": ["r0"], "train": ["t0"]}, {"rollout": ["r0", "r1"], "train": ["t0"]}, {"rollout": ["r1"], "train": ["t0"]})


class Scene:
    """`join` as often as wanted -> `play`. `remembers` None: drawn."""

    def __init__(self, world: World, planted: str = "", remembers: bool | None = None, die_at: DieAt | None = None) -> None:
        self.world, self._planted = world, planted
        rng = world.rng
        pools = {
            "rollout": Pool(nodes=[Node(name="r0"), Node(name="r1")]),
            "train": Pool(nodes=[Node(name="t0")]),
        }
        schedule, kill_grace = rng.choice(_SCHEDULES), rng.choice([0.1, 2.0])
        config = Config(pools=pools, schedule=schedule, lease_timeout=LEASE_S, kill_grace=kill_grace)
        remembers = rng.random() < 0.7 if remembers is None else remembers
        self.coordinator = CoordinatorProcess(world, config, remembers, planted, die_at)
        self.jobs: list[JobProcess] = []

    def join(self, says_all: bool = False) -> None:
        rng, number = self.world.rng, len(self.jobs) + 1
        nodes, steps = _SETS[number % len(_SETS)] if says_all else rng.choice(_SETS), rng.randint(1, 4)
        job = JobProcess(self.world, self.coordinator, number, nodes, steps, LEASE_S, self._planted, says_all)
        self.jobs.append(job)

    def play(self) -> None:
        """Until everybody has ended, or has had more than time enough to."""
        self.world.run(FAULTS_S)
        self.world.calm = True
        self.world.run(FAULTS_S + _CALM_S, over=lambda: all(job.has_ended for job in self.jobs))
        for job in self.jobs:
            if not job.has_ended:
                self.world.violated("waits for ever", job.name)
