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


# Where host memory is short: jobs that it holds at once, and seconds that each of them has to itself.
_ROOM, _RESIDENT_S = 2, 10.0


class Scene:
    """`join` as often as wanted -> `play`. `remembers` None: drawn. `crowded`: host memory is short, and jobs leave it for the
    disk and come back."""

    def __init__(self, world: World, planted: str = "", remembers: bool | None = None, die_at: DieAt | None = None,
                 crowded: bool = False) -> None:  # fmt: skip
        self.world, self._planted = world, planted
        rng = world.rng
        pools = {
            "rollout": Pool(nodes=[Node(name="r0"), Node(name="r1")]),
            "train": Pool(nodes=[Node(name="t0", host_bytes=_ROOM if crowded else None)]),
        }
        config = Config(pools=pools, schedule=rng.choice(_SCHEDULES), lease_timeout=LEASE_S, kill_grace=rng.choice([0.1, 2.0]),
                        evict_to_disk_after=_RESIDENT_S if crowded else None)  # fmt: skip
        remembers = rng.random() < 0.7 if remembers is None else remembers
        self.coordinator = CoordinatorProcess(world, config, remembers, planted, die_at)
        self._crowded = crowded
        self.jobs: list[JobProcess] = []

    def join(self, says_all: bool = False) -> None:
        rng, number = self.world.rng, len(self.jobs) + 1
        nodes, steps = _SETS[number % len(_SETS)] if says_all else rng.choice(_SETS), rng.randint(1, 4)
        crowd = self if self._crowded else None
        job = JobProcess(self.world, self.coordinator, number, nodes, steps, LEASE_S, self._planted, says_all, crowd)
        self.jobs.append(job)

    # --- as the Crowd of its jobs ---

    def came_in(self, job: JobProcess) -> None:
        """A coordinator that forgot everything takes back the jobs that report in time, and does not know of those that report
        late."""
        inside = [other.name for other in self.jobs if other.is_in]
        if len(inside) > _ROOM and self.coordinator.remembers:
            self.world.violated("host memory overfull", f"{', '.join(inside)} are in")

    def left(self, job: JobProcess, done: int) -> None:
        """It is started again from its checkpoint."""
        self.world.faults["left for the disk"] += 1
        self.jobs.append(job.started_again(done))

    def play(self) -> None:
        """Until everybody has ended, or has had more than time enough to."""
        self.world.run(FAULTS_S)
        self.world.calm = True
        self.world.run(FAULTS_S + _CALM_S, over=lambda: all(job.has_ended for job in self.jobs))
        for job in self.jobs:
            if not job.has_ended:
                self.world.violated("waits for ever", job.name)
