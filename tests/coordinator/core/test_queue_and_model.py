"""The queues of leases and the model by which placement predicts (scheduling/time/group_run.py) grant the same phases at the same
times, whatever jobs share which nodes in which order."""

import heapq
import random
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.coordinator.driver import config
from tests.exploring import examples
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core.records import Input, Send, Watched
from verl_mux.coordinator.core.state import Machine
from verl_mux.placement.group_run import ROLLOUT, TRAIN, GroupRun, Member

SIDES = {"rollout": ["r0", "r1", "r2"], "train": ["t0", "t1", "t2"]}
BITS = {node: 1 << i for i, node in enumerate([*SIDES["rollout"], *SIDES["train"]])}
POOLS = {side: {"nodes": [{"name": name} for name in names]} for side, names in SIDES.items()}
PHASES = {ROLLOUT: "rollout", TRAIN: "train"}


class Sharer:
    """A job: its nodes by phase, its rank, when it asks for its first rollout, and the seconds of its phases."""

    def __init__(self, name, nodes, rank, begins, seconds):
        self.name, self.nodes, self.rank, self.begins, self.seconds = name, nodes, rank, begins, seconds


@st.composite
def sharers(draw):
    """Two to five, some of them colocated; no two things happen at the same time. Half of the groups have an order."""
    clock = random.Random(draw(st.integers(0, 2**32)))
    ranked = draw(st.booleans())
    found = []
    for number in range(draw(st.integers(2, 5))):
        train = draw(st.lists(st.sampled_from(SIDES["train"]), min_size=1, unique=True))
        separate = draw(st.lists(st.sampled_from(SIDES["rollout"]), min_size=1, unique=True))
        nodes = {"rollout": train if draw(st.booleans()) else separate, "train": train}
        steps = draw(st.integers(1, 8))
        seconds = [[clock.uniform(1, 100), clock.uniform(1, 100)] for _ in range(steps)]
        rank = draw(st.integers(0, 3)) if ranked else 0
        found.append(Sharer(f"j{number}", nodes, rank, clock.uniform(1, 200), seconds))
    return found


def by_the_model(jobs):
    """(when, job, phase, step) of every grant."""
    grants, steps = [], {job.name: len(job.seconds) for job in jobs}

    def told(job, phase):
        for step, seconds in enumerate(job.seconds, start=1):
            grants.append((run.now, job.name, PHASES[phase], step))
            yield seconds[phase == TRAIN]

    run = GroupRun()
    for job in jobs:
        rollout, train = (sum(BITS[node] for node in job.nodes[side]) for side in ("rollout", "train"))
        times = told(job, ROLLOUT), iter(()), told(job, TRAIN)
        spec = SimpleNamespace(name=job.name, tail_s=0.0, rollout_switch_s=0.0, train_switch_s=0.0)
        run.join(Member(spec, rollout, train, job.rank, times), job.begins)
    while run.members:
        member = run.step()
        if member is not None and member.done == steps[member.name]:
            run = _without(run, member)
    return grants


def _without(run, gone):
    """As in a replay: who is left goes on in another run."""
    left = GroupRun(run.now)
    for member, ends in zip(run.members, run.ends, strict=True):
        if member is not gone:
            left.resume(member, ends)
    return left


def by_the_queues(jobs):
    """The same, of a coordinator whose jobs ask for a phase whenever they have given the one before it back."""
    grants, by_name, serial = [], {job.name: job for job in jobs}, iter(range(10**6))
    machine = Machine(config(pools=POOLS, lease_timeout=1e6))
    where = {"host": "here", "pid": 7, "started": 1}
    who = {job.name: {"job": job.name, "uid": f"{job.name}:1", "client": f"{job.name}-client"} for job in jobs}
    coming = []
    for job in jobs:
        machine.handle(Input(0.0, m.Register(**who[job.name], nodes=job.nodes, **where)))
        machine.state.jobs[job.name].watched = Watched(rank=job.rank)
        coming.append((job.begins, next(serial), job.name, None, ("rollout", 1)))
    heapq.heapify(coming)
    while coming:
        now, _, name, token, following = heapq.heappop(coming)
        inputs = [] if token is None else [m.LeaseRelease(**who[name], token=token)]
        if following is not None:
            phase, step = following
            nodes = by_name[name].nodes[phase]
            inputs.append(m.LeaseRequest(**who[name], key=f"{name}.{phase}.{step}", phase=phase, step=step, nodes=nodes))
        for what in inputs:
            for grant in [out.message for out in machine.handle(Input(now, what)) if isinstance(out, Send)]:
                if isinstance(grant, m.LeaseGrant):
                    job = by_name[grant.key.split(".")[0]]
                    grants.append((now, job.name, grant.phase, grant.step))
                    ends = now + job.seconds[grant.step - 1][grant.phase == "train"]
                    heapq.heappush(coming, (ends, next(serial), job.name, grant.token, _after(job, grant)))
    return grants


def _after(job, grant):
    if grant.phase == "rollout":
        return "train", grant.step
    return ("rollout", grant.step + 1) if grant.step < len(job.seconds) else None


@settings(max_examples=examples(150))
@given(sharers())
def test_they_grant_the_same_phases_at_the_same_times(jobs):
    found, expected = by_the_queues(jobs), by_the_model(jobs)
    assert len(found) == sum(2 * len(job.seconds) for job in jobs)
    assert found == expected
