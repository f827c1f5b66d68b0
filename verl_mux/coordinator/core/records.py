"""What the coordinator remembers (jobs, requests, leases, hosts, placements), what goes into its state machine, and what comes
out. Plain data, no behaviour.

Runs in the coordinator; the core alone changes the records, and the journal writes records and inputs. A snapshot for the
journal is one encode, and two histories are compared with `==`. What can be derived is not stored: a node is free when no lease
names it; a lease is being reclaimed when its job is SILENT or DYING.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.messages import Member
from verl_mux.coordinator.core.settings import Pool
from verl_mux.placement.estimator import Observed
from verl_mux.placement.questions import Answer, Question, Record


class JobState(Enum):
    LIVE = "live"  # heard from within the lease timeout
    SILENT = "silent"  # not heard from, driver not known to be dead: nodes stay taken, a sign of life restores it
    DYING = "dying"  # driver dead or said to be: nodes stay taken until the last process is gone
    ENDED = "ended"  # holds nothing


RUNNING = (JobState.LIVE, JobState.SILENT)


class Watched(msgspec.Struct, kw_only=True):
    """What placement learns of a job that it placed. `steps`: the last step seen, by phase. `began`: first rollout asked
    for. `free_since`: it neither holds nor asks for nodes since then; `between`: seconds of that in this step.
    `move_s`: what its last move took.
    `alone_s`: what its finished steps took without waiting, `step_s`: the same of the step that it is in.
    `fresh`: steps seen since its co-execution group changed. `doing`: the phase that it is in or waits for (asked for or, if it
    runs, granted at this time). `rank`: among those of its group that wait, see
    ORDERS in placement/model.py. `because`: why it is where it is, the end of a sentence."""

    observed: Observed = Observed()
    steps: dict[str, int] = {}
    began: float | None = None
    first_step: int = 0
    free_since: float | None = None
    between: float = 0.0
    alone_s: float = 0.0
    step_s: float = 0.0
    fresh: int = 0
    doing: tuple[str, float, bool] = ("rollout", 0.0, False)
    rank: int = 0
    move_s: float | None = None
    because: str = ""


class Moving(msgspec.Struct, kw_only=True):
    """A running job on its way to the nodes on which `State.placed` has it by now. `number`: of the move, as the job hears it.
    `since`: decided. `before`: the nodes that its start `uid` leaves. `left_at`: when, None: not yet. Then `done`: its last
    step; `ended_at`: when that ended; `saving_s`: the part of it that a checkpoint for the move took; `watched`: as it was."""

    number: int
    since: float
    before: dict[str, list[str]]
    uid: str
    left_at: float | None = None
    done: int = 0
    ended_at: float = 0.0
    saving_s: float = 0.0
    watched: Watched = msgspec.field(default_factory=Watched)


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one job on one node, by kind. `declared` by the job when it registered. `measured` last, by `source` (the agent of
    the node's host, or the job; empty: not measured yet). `most`: the largest measured sum of all kinds since the job settled
    (see hosts.py)."""

    declared: dict[str, int] = msgspec.field(default_factory=dict, name="told")  # its name in journals and in `status --json`
    measured: dict[str, int] = {}
    source: str = ""
    most: int = 0


class Job(msgspec.Struct, kw_only=True):
    """`order`: registration order. `asked`, `reported`: highest step asked for, highest step reported as finished. `since`: when
    it came into its state. `memory`: node -> tag -> bytes on the device; `host_memory`: by node. `contended`, `gangs`: as last
    pushed to its clients. `has_asked` for any lease. `registrations`: the number of each client's newest one. `closed`, `spent`:
    see leases.py. `longest`: seconds by phase; `overdue`: tokens whose phases take far longer. `last`: seconds of the last one,
    by phase. `condemned`: why its nodes were taken away, which ends its driver too. `filler`: see queueing.py; it has no steps,
    and no job waits for it. `grace`: seconds that it may need to leave, as it says."""

    name: str
    uid: str
    order: int
    since: float
    state: JobState = JobState.LIVE
    host: str = ""
    pid: int = 0
    started: int = 0
    boot: str = ""
    space: str = ""
    nodes: dict[str, list[str]] = {}
    seed: int = 0
    steps: int | None = None
    clients: list[str] = []
    registrations: dict[str, int] = {}
    members: list[Member] = []
    has_asked: bool = False
    asked: int = 0
    reported: int = 0
    died_at: float | None = None
    reason: str = ""
    has_exited: bool = msgspec.field(default=False, name="told")  # by its launcher's word
    note: str = ""
    progress: tuple[int, int] | None = None
    metrics: dict[str, float] = {}
    memory: dict[str, dict[str, int]] = {}
    host_memory: dict[str, HostMemory] = {}
    contended: list[str] = []
    gangs: list[list[str]] = []
    closed: dict[int, bool] = {}
    spent: list[str] = []
    longest: dict[str, float] = {}
    last: dict[str, float] = {}
    overdue: list[int] = []
    condemned: str = ""
    filler: bool = False
    grace: float = 0.0
    watched: Watched | None = None  # only of a job that leaves its nodes to the coordinator

    @property
    def driver(self) -> Member:
        return Member(self.host, self.pid, self.started, self.boot, self.space)

    @property
    def all_nodes(self) -> list[str]:
        return list(dict.fromkeys(node for nodes in self.nodes.values() for node in nodes))

    @property
    def initialised(self) -> bool:
        """It has asked for its first step, so all its engines are up, and it counts as an expected job that has arrived."""
        return max(self.asked, self.reported) > 0

    @property
    def finished(self) -> int:
        """Steps known to be behind it: asking for step k means that k - 1 is done."""
        return max(self.asked - 1, self.reported)

    @property
    def running(self) -> bool:
        """Counts for turns and barriers: no filler, neither gone nor through with all its steps."""
        alive = self.state in (JobState.LIVE, JobState.SILENT)
        # A job that asks for more steps than it said goes on.
        return alive and not self.filler and (self.steps is None or self.reported < max(self.steps, self.asked))


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """`num_nodes`: how many of `nodes` a filler asks for; 0: a job, which asks for all. `least`: seconds for which a filler wants
    to keep them, as far as can be expected."""

    key: str
    job: str
    client: str
    phase: str
    step: int
    nodes: list[str]
    asked_at: float
    num_nodes: int = 0
    least: float = 0.0

    @property
    def is_fillers(self) -> bool:
        return self.num_nodes > 0


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    token: int
    key: str
    job: str
    client: str
    phase: str
    step: int
    nodes: list[str]
    granted_at: float


class Usage(msgspec.Struct, kw_only=True):
    """Of a node: the first lease on it began at `since`; seconds of the leases of jobs and of fillers that are over."""

    since: float
    jobs: float = 0.0
    fillers: float = 0.0


class Owed(msgspec.Struct, frozen=True, kw_only=True):
    """What may be left of a job where nothing could look. `nodes`: what it held there, fenced until an agent has looked."""

    job: str
    uid: str
    since: float
    nodes: list[str] = []


class Host(msgspec.Struct, kw_only=True):
    """A machine, or a part of it with process ids of its own. `names`: by which nodes may call it. `agent`: one has spoken from
    there; `gone`: it is not heard any more. `excused`: nodes that were given on by hand since then."""

    names: list[str]
    since: float
    boot: str = ""
    space: str = ""
    agent: bool = False
    gone: bool = False
    excused: list[str] = []
    owed: list[Owed] = []

    @property
    def name(self) -> str:
        return self.names[0]


class State(msgspec.Struct, kw_only=True):
    """`requests` in order of arrival. `token`: the last one given out. `segment`: index into the schedule, never falls.
    `started`: all expected jobs were there. `settle_until`: no grants before it, because memory was lost, in seconds for which
    this start of the coordinator has run; `unknown_up_to`: the last token of which it may not know.
    `peaks`: node -> `init` or segment index -> highest sum of tagged bytes of all jobs. `placed`: what the scheduler
    remembers of the jobs it placed; `questions`: what it was asked and has not answered. `moves`: by job; `num_moves` ever;
    `ask_again_at`: when other moves may have come to pay. `usage`: by node. `hosts`: by name and PID namespace. `fenced`: nodes
    that no job is given now, and why; derived from `hosts`."""

    jobs: dict[str, Job] = {}
    requests: list[Request] = []
    leases: dict[int, Lease] = {}
    token: int = 0
    num_registered: int = 0
    segment: int = 0
    started: bool = False
    stepping: bool = False
    settle_until: float | None = None
    unknown_up_to: int = 0
    peaks: dict[str, dict[str, int]] = {}
    placed: Record = Record()
    questions: list[Question] = []
    moves: dict[str, Moving] = {}
    num_moves: int = 0
    ask_again_at: float | None = None
    usage: dict[str, Usage] = {}
    hosts: dict[str, Host] = {}
    fenced: dict[str, str] = {}

    def leases_of(self, job: str) -> list[Lease]:
        return [lease for lease in self.leases.values() if lease.job == job]

    def watched_of(self, job: str) -> Watched:
        """Of a job that was placed. Of one that has left and is no longer on record, which the placer has yet to take out of
        its group, nothing is known, unless it comes back."""
        known, moving = self.jobs.get(job), self.moves.get(job)
        if known is not None and known.watched is not None:
            return known.watched
        return Watched() if moving is None else moving.watched

    def bytes_on(self, node: str) -> int:
        return sum(sum(job.memory[node].values()) for job in self.jobs.values() if node in job.memory)


# --- inputs: a message of a job, or what the server saw by itself ---


class Seen(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Something the server saw by itself about `job`; `uid` None: whichever start of the job is on record."""

    job: str
    uid: str | None = None


class JobSilent(Seen, frozen=True, kw_only=True, tag="JOB_SILENT"):
    """No message within the lease timeout."""


class JobRevoked(Seen, frozen=True, kw_only=True, tag="JOB_REVOKED"):
    """Silent beyond its lease, and another job waits for what it holds up, or silent for far longer. `since`: when it had to keep
    off its nodes. `waited`: whether another job waits."""

    since: float
    waited: bool = True


class PhaseOverdue(Seen, frozen=True, kw_only=True, tag="PHASE_OVERDUE"):
    """The phase under `token` takes far longer than such phases of the job did."""

    token: int


class JobEvicted(Seen, frozen=True, kw_only=True, tag="JOB_EVICTED"):
    """An operator, or the coordinator itself, wants the job ended, as if it had failed."""

    reason: str


class DriverDied(Seen, frozen=True, kw_only=True, tag="DRIVER_DIED"):
    """The process that registered the job is no more."""


class JobExited(Seen, frozen=True, kw_only=True, tag="JOB_EXITED"):
    """The job's launcher says that the job is over. A job that never registered then counts as arrived, where jobs are
    expected."""


class ProcessesGone(Seen, frozen=True, kw_only=True, tag="PROCESSES_GONE"):
    """No process of a dying job is left."""


class NodeEmpty(Seen, frozen=True, kw_only=True, tag="NODE_EMPTY"):
    """All that look at the node's host saw no process of the dying job there."""

    node: str


class NodesOwed(Seen, frozen=True, kw_only=True, tag="NODES_OWED"):
    """Nothing looks at `host` (its name and PID namespace, or the name alone): these nodes of the dying job are fenced from now
    on, and what may be left of the job there keeps it on record no longer."""

    host: str
    nodes: list[str]


class HostMeasured(Seen, frozen=True, kw_only=True, tag="HOST_MEASURED"):
    """Host memory of the job's processes on the node, in bytes by kind, as the agent of the node's host saw it."""

    node: str
    bytes: dict[str, int]


class HostSeen(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="HOST_SEEN"):
    """An agent speaks from there: the first, or again, or after a boot."""

    host: m.HostName


class HostGone(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="HOST_GONE"):
    """Its agent was not heard for as long as a lease is good."""

    host: str


class OwedPaid(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="OWED_PAID"):
    """Nothing is left on the host of the job with this uid."""

    host: str
    uid: str


class HostReleased(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="HOST_RELEASED"):
    """An operator says that nothing of dying jobs is left on this host."""

    host: str


class PoolsChanged(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="POOLS_CHANGED"):
    """The configuration file was read again, and the change is allowed (hosts.py)."""

    pools: dict[str, Pool]


class NodeReleased(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="NODE_RELEASED"):
    """An operator says that nothing of a dying job is left on this node, where nothing looks."""

    node: str


class Settled(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="SETTLED"):
    """The time for asserting leases after a loss of memory is over."""


class MoveGivenUp(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="MOVE_GIVEN_UP"):
    """The job left for other nodes, and has not come back for too long."""

    job: str


class MovesDue(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="MOVES_DUE"):
    """Moves that did not pay when they were last thought of may pay by now."""


class Planned(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="PLANNED"):
    """What the placer answers to the first of its questions. `version`: of the record that the question was asked about; an
    answer to another one is void."""

    version: int
    answer: Answer


_Seen = JobSilent | JobRevoked | PhaseOverdue | JobEvicted | DriverDied | JobExited | ProcessesGone | NodeEmpty | NodesOwed
AboutJob = m.AnyFromJob | _Seen | HostMeasured
AboutHosts = HostSeen | HostGone | OwedPaid | HostReleased | NodeReleased | PoolsChanged
AboutMoves = Planned | MoveGivenUp | MovesDue
What = AboutJob | AboutHosts | AboutMoves | Settled


class Input(msgspec.Struct, frozen=True):
    now: float
    what: What


class Send(msgspec.Struct, frozen=True):
    client: str
    message: m.Message


class Log(msgspec.Struct, frozen=True):
    """One line for the event log; `duration` in seconds."""

    event: str
    extra: dict[str, Any]
    duration: float | None = None
    step: int | None = None


Instruction = Send | Log
