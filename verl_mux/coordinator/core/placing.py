"""Jobs that leave their nodes to the coordinator are placed when they come, the rest planned anew when they go.

    asked for `auto` -> estimated from its needs -> placed | waits -> placed when a job leaves -> gone
                                                        observed step by step: estimates corrected, errors recorded
                                                        moved, if its launcher starts it again (placed_jobs.py)

A question is put on record; the Answerer (asking.py) answers it, beside the leases; the answer is an input like any other, so a
restart finds every placement as it was, and the questions that were open. `verl-mux plan` and the policy `live` of `simulate` ask
the same planner. Closed to it are nodes that jobs name themselves, as long as those jobs live, and those that are draining or
fenced. Runs in the coordinator: `Placement` is called by state.py at the moments of `Feature`; pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import asking, hosts, placed_jobs, registration
from verl_mux.coordinator.core.asking import Asked
from verl_mux.coordinator.core.leases import Feature, Handler
from verl_mux.coordinator.core.placed_jobs import predicted
from verl_mux.coordinator.core.records import (
    RUNNING,
    HostMeasured,
    Instruction,
    Job,
    JobState,
    Lease,
    Log,
    MoveGivenUp,
    MovesDue,
    Planned,
    Request,
    Send,
    State,
    Watched,
    What,
)
from verl_mux.coordinator.core.settings import Config
from verl_mux.errors import UserError
from verl_mux.placement.estimator import WINDOW, corrected
from verl_mux.placement.job_needs import JobNeeds
from verl_mux.placement.model import Cluster, Group, JobSpec, Pin
from verl_mux.placement.planner import ASK_AGAIN_S, Again, Arrive, Correct, Leave, Open, Record, Vacate
from verl_mux.placement.rules import ORDERS

# Of one phase: longer ones no clock here was made for.
MOST_S = 1e6
# Of a job that was sent somewhere by an answer about others.
_BECAUSE = {
    "start": "which came free while it waited",
    "move": "where it was moved, as that keeps an SLO, saves more than the move costs, or its node was taken away",
}


def check(asked: m.Register, state: State, config: Config) -> None:
    """Whether the job can ever be placed. Raises UserError."""
    if config.placement is None:
        raise UserError(
            f"job {asked.job!r} leaves its nodes to the coordinator, which has no `placement: scheduler`; name nodes:"
            f" {config.describe_pools()}"
        )
    if asked.needs is None:
        raise UserError(f"job {asked.job!r} leaves its nodes to the coordinator but does not say what it needs")
    if asked.slo is not None and not asked.slo >= 1:
        raise UserError(f"job {asked.job!r}: slo is {asked.slo:g}; an SLO is a factor of at least 1")
    for side in m.SIDES:
        seconds = getattr(asked.profiled, side)
        if len(seconds) > WINDOW or not all(0 < each < MOST_S for each in seconds):
            raise UserError(
                f"job {asked.job!r}: profiled {side} phases {list(seconds)[:5]}; at most {WINDOW} of more than 0 and less than"
                f" {MOST_S:g} s are allowed"
            )
    if asked.colocated and asked.needs.rollout_nodes != asked.needs.train_nodes:
        raise UserError(
            f"job {asked.job!r} runs both phases on the same nodes, but asks for {asked.needs.rollout_nodes} for rollout and"
            f" {asked.needs.train_nodes} for train"
        )
    if asked.placed:
        _check_claimed(asked, asked.needs, config.clusters[asking.claimed_pair(asked, config)])
    asking.of_job(asked, config)


def _check_claimed(asked: m.Register, needs: JobNeeds, cluster: Cluster) -> None:
    """Whether a job can have been placed where it says it was. Raises UserError."""
    for side, pool_there in zip(m.SIDES, asking.pools(asked, cluster), strict=True):
        names, count = asked.placed.get(side, []), getattr(needs, f"{side}_nodes")
        pool = pool_there.nodes or ()
        if len(set(names)) != count or len(names) != count or not set(names) <= set(pool):
            raise UserError(
                f"job {asked.job!r} says it was placed on {names[: count + 1]} for {side}; allowed: {count} of {', '.join(pool)}"
            )
    if asked.colocated and set(asked.placed["rollout"]) != set(asked.placed["train"]):
        raise UserError(
            f"job {asked.job!r} runs both phases on the same nodes, but says it was placed on {asked.placed['rollout']} for"
            f" rollout and {asked.placed['train']} for train"
        )


def named_by_hand(asked: m.Register, nodes: dict[str, list[str]], state: State) -> None:
    """Raises UserError where a job names nodes that placed jobs hold."""
    for group in state.placed.groups:
        for node in (*group.rollout_nodes, *group.train_nodes):
            if any(node in names for names in nodes.values()):
                jobs = ", ".join(job.name for job in group.jobs)
                raise UserError(
                    f"job {asked.job!r} names node {node!r}, on which the coordinator has placed {jobs}; leave the nodes to it"
                    " (`auto`), or name others"
                )


def arrive(state: State, config: Config, job: Job, asked: m.Register) -> list[Instruction]:
    """A job that has just come: the placer is asked where it goes, and `job.nodes` stays empty until it says so."""
    if placed_jobs.returns(state, job, asked):
        _pin(state, job)
        return []
    job.watched = Watched()
    found = asking.of_job(asked, config)
    first, spec = next(iter(found.items()))
    if asked.placed:
        return _readopt(state, config, job, found.get(asking.claimed_pair(asked, config), spec), asked.placed)
    out = give_up(state, job.name, "another job came under its name")
    state.questions.append(Arrive(spec, pair=first, elsewhere={pair: it for pair, it in found.items() if pair != first}))
    return out


def is_open(state: State, name: str) -> bool:
    """Whether the placer has yet to say where the job goes."""
    return any(isinstance(question, Arrive) and question.job.name == name for question in state.questions)


def leave(state: State, job: Job) -> list[Instruction]:
    """A job is over; its nodes are given on when the placer has said to whom. One that comes back keeps its place."""
    if placed_jobs.comes_back(state, job):
        return []
    out = placed_jobs.given_up(state, job.name, "it ended instead")
    if job.watched is not None:
        state.questions.append(Leave(job.name))
    elif not job.filler:
        open_again(state)
    return out


def give_up(state: State, name: str, reason: str) -> list[Instruction]:
    """The place of a job that is away is kept no longer."""
    out = placed_jobs.given_up(state, name, reason)
    if out:
        state.questions.append(Leave(name))
    return out


def ask_again(state: State) -> None:
    """Moves that did not pay may pay by now."""
    state.ask_again_at = None
    if Again() not in state.questions[1:]:
        state.questions.append(Again())


def open_again(state: State) -> None:
    """Nodes are open that were closed to the placer: jobs that wait, or are about to, may go there."""
    if (state.placed.waiting or state.questions) and Open() not in state.questions[1:]:
        state.questions.append(Open())


def vacate(state: State, node: str) -> None:
    """This node is to be emptied: the jobs placed there that can be moved go elsewhere."""
    if any(node in (*group.rollout_nodes, *group.train_nodes) for group in state.placed.groups):
        state.questions.append(Vacate(node))


def correct(state: State, spec: JobSpec) -> None:
    """A job turns out other than estimated. The last of several corrections that wait is enough."""
    state.questions = [q for q in state.questions if not (isinstance(q, Correct) and q.job.name == spec.name)]
    state.questions.append(Correct(spec))


def asked(state: State, config: Config, now: float) -> Asked | None:
    """The next question for the placer, if there is one."""
    if not state.questions or config.placement is None:
        return None
    named = (job for job in state.jobs.values() if job.watched is None and not job.filler and job.state is not JobState.ENDED)
    by_hand = (node for job in named for node in job.all_nodes)
    closed = frozenset(by_hand) | hosts.shut(state, config)
    return Asked(state.questions[0], state.placed, config, closed, now, held=frozenset(state.moves))


def carry_out(state: State, config: Config, answer: Planned, now: float) -> tuple[list[Job], list[Instruction]]:
    """Takes over what the placer answered. Returns the jobs that learn their nodes now, and what to log."""
    if answer.version != state.placed.version or not state.questions or _takes_what_left(answer, state, config):
        return [], []  # it was asked about other records, and will be asked again
    question, before = state.questions.pop(0), state.placed
    state.placed = before.changed(answer.gone, answer.changed, tuple(answer.waiting), answer.named, tuple(answer.moved_at))
    state.ask_again_at = now + ASK_AGAIN_S if answer.pending else None
    said = [Log(line.event, line.about) for line in answer.said]
    for move in answer.moves:
        state.watched_of(move.job).because = _BECAUSE[move.kind]
    if isinstance(question, Arrive):
        state.watched_of(question.job.name).because = answer.because
    asked = [line for move in answer.moves if move.kind == "move" for line in placed_jobs.move_decided(state, move, now)]
    names = [move.job for move in answer.moves if move.kind == "start"]
    names += [question.job.name] if isinstance(question, Arrive) else []
    # One that left and came again waits for its own answer.
    placed = [state.jobs[name] for name in names if name in state.jobs and not is_open(state, name)]
    for job in placed:
        _pin(state, job)
    for group in answer.changed:
        for spec, rank in zip(group.jobs, ORDERS[group.order](group.jobs), strict=True):
            state.watched_of(spec.name).rank = rank
    return placed, [*said, *asked, *_regrouped(before, answer.changed, state, config)]


def _takes_what_left(answer: Planned, state: State, config: Config) -> bool:
    """Whether it places a job on a node that has left, or began to drain, since the question."""
    nodes = {node for group in answer.changed for node in (*group.rollout_nodes, *group.train_nodes)}
    had = {node for group in state.placed.groups for node in (*group.rollout_nodes, *group.train_nodes)}
    return not nodes <= config.nodes.keys() or not (nodes - had).isdisjoint(config.draining)


def waits_for(state: State, job: Job) -> list[str]:
    """Jobs that have yet to leave the nodes on which this one was placed."""
    group = state.placed.group_of(job.name)
    pins = [pin for pin in group.pins if pin.job.name == job.name] if group is not None else []
    return [name for pin in pins for name in placed_jobs.in_the_way(state, job.name, {*pin.rollout, *pin.train})]


def free_by_now(state: State) -> list[Job]:
    """Jobs whose nodes another job had yet to leave, and has left by now."""
    waited = [
        job
        for job in state.jobs.values()
        if job.watched is not None and not job.nodes and job.state in RUNNING and not is_open(state, job.name)
    ]
    for job in waited:
        _pin(state, job)
    return [job for job in waited if job.nodes]


def _readopt(state: State, config: Config, job: Job, spec: JobSpec, placed: dict[str, list[str]]) -> list[Instruction]:
    """After a loss of memory: the job is where it says, with all jobs that share a node with it."""
    pin = Pin(job=spec, rollout=() if spec.colocated else tuple(placed["rollout"]), train=tuple(placed["train"]))
    mine = {*pin.rollout, *pin.train}
    near = [group for group in state.placed.groups if mine & {*group.rollout_nodes, *group.train_nodes}]
    before, named = state.placed, state.placed.named + (not near)
    pins = (*(each for group in near for each in group.pins), pin)
    merged = Group(
        name=near[0].name if near else f"g{named}",
        pins=pins,
        rollout_nodes=tuple(dict.fromkeys(node for each in pins for node in each.rollout)),
        train_nodes=tuple(dict.fromkeys(node for each in pins for node in each.train)),
    )
    state.placed = before.changed([group.name for group in near], [merged], before.waiting, named, before.moved_at)
    _pin(state, job)
    return _regrouped(before, [merged], state, config)


def _where(group: Group) -> dict[str, tuple[frozenset[str], frozenset[str]]]:
    """The nodes of each of its jobs, by name."""
    return {pin.job.name: (frozenset(pin.rollout), frozenset(pin.train)) for pin in group.pins}


def _pin(state: State, job: Job) -> None:
    """The job is where it was placed; while others have yet to leave those nodes, it has none."""
    group = state.placed.group_of(job.name)
    if group is not None:
        pin = next(pin for pin in group.pins if pin.job.name == job.name)
        if waits_for(state, job):
            return
        job.nodes = {"rollout": list(pin.runs_rollouts_on), "train": list(pin.train)}
        job.host_memory = hosts.estimated(pin)


def _regrouped(before: Record, groups: Iterable[Group], state: State, config: Config) -> list[Instruction]:
    """What is predicted for every group whose jobs or their nodes have changed; their observations begin anew."""
    out: list[Instruction] = []
    for group in groups:
        old = before.by_name.get(group.name)
        names = [job.name for job in group.jobs]
        if old is None or _where(old) != _where(group):
            for name in names:
                state.watched_of(name).fresh = 0
            out.append(predicted(group, state, config))
    return out


class Placement(Feature):
    _resumed_at = 0.0

    def handlers(self) -> Mapping[type, Handler]:
        return {
            Planned: lambda now, job, what: self._start(*carry_out(self.core.state, self.core.config, what, now)),
            MoveGivenUp: lambda now, job, what: give_up(self.core.state, what.job, "it did not come back in time"),
            MovesDue: self._ask_again,
            **dict.fromkeys((HostMeasured, m.HostReport), self._measured),
        }

    def refusal(self, asked: m.Register, nodes: dict[str, list[str]], is_known: bool) -> str | None:
        if asked.wants_placement:
            check(asked, self.core.state, self.core.config)
        elif not asked.filler:
            named_by_hand(asked, nodes, self.core.state)
        return None

    def registered(self, now: float, job: Job, asked: m.Register) -> list[Instruction]:
        return arrive(self.core.state, self.core.config, job, asked) if asked.wants_placement else []

    def why_queued(self, job: Job) -> str | None:
        if job.nodes:
            return None
        queue = [entry.job.name for entry in self.core.state.placed.waiting]
        if before := waits_for(self.core.state, job):
            return f"job {job.name!r} waits until {', '.join(before)} has left for other nodes"
        if job.name in queue:
            return f"job {job.name!r} waits for nodes: no room within everybody's SLO, {queue.index(job.name)} jobs before it"
        return f"job {job.name!r} waits to be placed"

    def answers_later(self, job: Job) -> bool:
        return is_open(self.core.state, job.name)

    def leaves(self, now: float, job: Job, what: m.Deregister) -> None:
        placed_jobs.leaves(self.core.state, job, what, now)

    def ended(self, now: float, job: Job) -> list[Instruction]:
        given_up = leave(self.core.state, job)
        return self._start(free_by_now(self.core.state), given_up)

    def requested(self, now: float, job: Job, request: Request) -> list[Instruction]:
        moved = placed_jobs.begins(self.core.state, self.core.config, job, request, now)
        placed_jobs.asked(job, request)
        if moved:
            self._correct(job)
        return moved

    def granted(self, now: float, lease: Lease) -> None:
        if (watched := self.core.state.jobs[lease.job].watched) is not None:
            placed_jobs.granted(watched, lease.phase, now)

    def released(self, now: float, job: Job, lease: Lease) -> list[Instruction]:
        """What the phase took, and what that changes."""
        state, spec = self.core.state, self.core.state.placed.job(job.name)
        if job.watched is None or spec is None:
            return []
        placed_jobs.counted(job.watched, lease, now)
        if job.name in state.moves:  # a phase that ends with a checkpoint for it says nothing of others
            job.watched.free_since = now
            return []
        out = placed_jobs.released(job.watched, lease, spec, now)
        self._correct(job, anyway=placed_jobs.is_known(job.watched, lease))
        group = state.placed.group_of(job.name)
        if group is not None and lease.phase == "train" and placed_jobs.is_due(group, job, state, self.core.config):
            out.append(placed_jobs.predicted(group, state, self.core.config))
        return out

    def resumed(self, now: float) -> None:
        self._resumed_at = now

    def due(self, now: float) -> list[What]:
        return placed_jobs.due(self.core.state, now, self._resumed_at)

    def move_of(self, job: Job) -> int:
        return placed_jobs.move_of(self.core.state, job)

    def nodes_opened(self) -> None:
        open_again(self.core.state)

    def node_drained(self, node: str) -> None:
        vacate(self.core.state, node)

    def _ask_again(self, now: float, job: None, what: MovesDue) -> list[Instruction]:
        ask_again(self.core.state)
        return []

    def _measured(self, now: float, job: Job, what: HostMeasured | m.HostReport) -> list[Instruction]:
        self._correct(job)
        return []

    def _start(self, started: list[Job], out: list[Instruction]) -> list[Instruction]:
        """Sends their nodes to jobs that asked for nodes, or that they wait."""
        return [*out, *(Send(c, registration.welcome(self.core, job, c)) for job in started for c in job.clients)]

    def _correct(self, job: Job, anyway: bool = False) -> None:
        """The placer learns of a job that turns out other than it was placed by; `anyway`: also of one that does not."""
        spec = self.core.state.placed.job(job.name)
        if job.watched is not None and spec is not None:
            revised = hosts.revised(job, corrected(spec, job.watched.observed) or spec)
            revised = placed_jobs.with_move_cost(job.watched, revised)
            if revised is not spec or anyway:
                correct(self.core.state, revised)
