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
from verl_mux.placement.planner import Answer, Question, Record


class JobState(Enum):
    LIVE = "live"  # heard from within the lease timeout
    SILENT = "silent"  # not heard from, driver not known to be dead: nodes stay taken, a sign of life restores it
    DYING = "dying"  # driver dead or said to be: nodes stay taken until the last process is gone
    ENDED = "ended"  # holds nothing


RUNNING = (JobState.LIVE, JobState.SILENT)


class Watched(msgspec.Struct, kw_only=True):
    """What placement learns of a job that it placed. Times in seconds."""

    observed: Observed = Observed()
    steps: dict[str, int] = {}  # the last step seen, by phase
    began: float | None = None  # when the first rollout was asked for
    first_step: int = 0
    free_since: float | None = None  # it neither holds nor asks for nodes since then
    between: float = 0.0  # time without nodes in this step
    alone_s: float = 0.0  # what its finished steps took without waiting
    step_s: float = 0.0  # the same of the step that it is in
    fresh: int = 0  # steps seen since its co-execution group changed
    # The phase that the job is in or waits for; when it was asked for or, if it runs, granted; whether it runs.
    doing: tuple[str, float, bool] = ("rollout", 0.0, False)
    rank: int = 0  # among those of its group that wait, see ORDERS in placement
    move_s: float | None = None  # what its last move took
    because: str = ""  # why it is where it is, the end of a sentence


class Moving(msgspec.Struct, kw_only=True):
    """A running job on its way to the nodes on which `State.placed` has it by now."""

    number: int  # of the move, as the job hears it
    since: float  # when it was decided
    before: dict[str, list[str]]  # the nodes that the start `uid` of the job leaves
    uid: str
    left_at: float | None = None  # None: not yet; what follows is of the moment of leaving
    done: int = 0  # its last step
    ended_at: float = 0.0  # when that ended
    saving_s: float = 0.0  # the part of that step which a checkpoint for the move took
    watched: Watched = msgspec.field(default_factory=Watched)


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one job on one node, by kind; see hosts.py."""

    declared: dict[str, int] = msgspec.field(default_factory=dict, name="told")  # its name in journals and in `status --json`
    measured: dict[str, int] = {}
    source: str = ""  # of the last measurement: the agent of the node's host, or the job; empty: not measured yet
    most: int = 0  # the largest measured sum of all kinds since the job settled


class Job(msgspec.Struct, kw_only=True):
    name: str
    uid: str
    order: int  # of registration
    since: float  # when it came into its state
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
    registrations: dict[str, int] = {}  # the number of each client's newest one
    members: list[Member] = []
    has_asked: bool = False  # for any lease
    asked: int = 0  # the highest step asked for
    reported: int = 0  # the highest step reported as finished
    died_at: float | None = None
    reason: str = ""
    has_exited: bool = msgspec.field(default=False, name="told")  # by its launcher's word
    note: str = ""
    noted_at: float = 0.0
    progress: tuple[int, int] | None = None
    metrics: dict[str, float] = {}
    memory: dict[str, dict[str, int]] = {}  # node -> tag -> bytes on the device
    host_memory: dict[str, HostMemory] = {}  # by node
    contended: list[str] = []  # as last pushed to its clients
    gangs: list[list[str]] = []  # as last pushed to its clients
    closed: dict[int, bool] = {}  # tokens, and whether they were taken away (leases.py)
    spent: list[str] = []  # keys of requests that were given back or cancelled
    longest: dict[str, float] = {}  # seconds by phase
    overdue: list[int] = []  # tokens whose phases take far longer
    condemned: str = ""  # why its nodes were taken away, which ends its driver too
    filler: bool = False  # it has no steps, and no job waits for it (queueing.py)
    grace: float = 0.0  # seconds that a filler may need to leave, as it says
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
        # A job that asks for more steps than it said goes on.
        is_through = self.steps is not None and self.reported >= max(self.steps, self.asked)
        return self.state in RUNNING and not self.filler and not is_through


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    job: str
    client: str
    phase: str
    step: int
    nodes: list[str]


class Request(_Asked, frozen=True, kw_only=True):
    asked_at: float
    num_nodes: int = 0  # of `nodes`, which a filler asks for; 0: a job, which asks for all

    @property
    def is_fillers(self) -> bool:
        return self.num_nodes > 0


class Lease(_Asked, frozen=True, kw_only=True):
    token: int
    granted_at: float


class Usage(msgspec.Struct, kw_only=True):
    """Of a node: the first lease on it began at `since`; seconds of the leases of jobs and of fillers that are over."""

    since: float
    jobs: float = 0.0
    fillers: float = 0.0


class Owed(msgspec.Struct, frozen=True, kw_only=True):
    """What may be left of a job where nothing could look."""

    job: str
    uid: str
    since: float
    nodes: list[str] = []  # what it held there, fenced until an agent has looked


class Host(msgspec.Struct, kw_only=True):
    """A machine, or a part of it with process ids of its own."""

    names: list[str]  # by which nodes may call it
    since: float
    boot: str = ""
    space: str = ""
    agent: bool = False  # one has spoken from there
    gone: bool = False  # it is not heard any more
    excused: list[str] = []  # nodes that were given on by hand since then
    owed: list[Owed] = []

    @property
    def name(self) -> str:
        return self.names[0]


class State(msgspec.Struct, kw_only=True):
    jobs: dict[str, Job] = {}
    requests: list[Request] = []  # in order of arrival
    leases: dict[int, Lease] = {}  # by token
    token: int = 0  # the last one given out
    num_registered: int = 0
    segment: int = 0  # index into the schedule, never falls
    started: bool = False  # all expected jobs were there
    stepping: bool = False  # a step has been granted
    # No grants before it, because memory was lost; in seconds for which this start of the coordinator has run.
    settle_until: float | None = None
    unknown_up_to: int = 0  # the last token of which it may not know
    peaks: dict[str, dict[str, int]] = {}  # node -> `init` or segment index -> highest sum of tagged bytes of all jobs
    placed: Record = Record()  # what the planner remembers of the jobs it placed
    questions: list[Question] = []  # that the planner was asked and has not answered
    moves: dict[str, Moving] = {}  # by job
    num_moves: int = 0  # ever
    ask_again_at: float | None = None  # when other moves may have come to pay
    usage: dict[str, Usage] = {}  # by node
    hosts: dict[str, Host] = {}  # by name and PID namespace
    rooms: dict[str, HostRoom] = {}  # by name and PID namespace
    fenced: dict[str, str] = {}  # nodes that no job is given now, and why; derived from `hosts`

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


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Something that the server saw by itself, or that an operator says."""


class AboutOne(Event, frozen=True, kw_only=True):
    """About `job`; `uid` None: whichever start of the job is on record."""

    job: str
    uid: str | None = None


class JobSilent(AboutOne, frozen=True, kw_only=True, tag="JOB_SILENT"):
    """No message came within the lease timeout."""


class JobRevoked(AboutOne, frozen=True, kw_only=True, tag="JOB_REVOKED"):
    since: float  # when the silent job had to keep off its nodes
    waited: bool = True  # another job waits for what it holds up; else it was silent for far longer than its lease


class PhaseOverdue(AboutOne, frozen=True, kw_only=True, tag="PHASE_OVERDUE"):
    token: int  # the phase under it takes far longer than such phases of the job did


class JobEvicted(AboutOne, frozen=True, kw_only=True, tag="JOB_EVICTED"):
    reason: str  # why an operator, or the coordinator itself, wants the job ended, as if it had failed


class DriverDied(AboutOne, frozen=True, kw_only=True, tag="DRIVER_DIED"):
    """The process that registered the job is no more."""


class JobExited(AboutOne, frozen=True, kw_only=True, tag="JOB_EXITED"):
    """The job's launcher says that the job is over. A job that never registered then counts as arrived, where jobs are
    expected."""


class ProcessesGone(AboutOne, frozen=True, kw_only=True, tag="PROCESSES_GONE"):
    """No process of a dying job is left."""


class NodeEmpty(AboutOne, frozen=True, kw_only=True, tag="NODE_EMPTY"):
    node: str  # all that look at its host saw no process of the dying job there


class NodesOwed(AboutOne, frozen=True, kw_only=True, tag="NODES_OWED"):
    """Nothing looks at `host` (its name and PID namespace, or the name alone): these nodes of the dying job are fenced from now
    on, and what may be left of the job there keeps it on record no longer."""

    host: str
    nodes: list[str]


class HostMeasured(AboutOne, frozen=True, kw_only=True, tag="HOST_MEASURED"):
    node: str
    bytes: dict[str, int]  # host memory of the job's processes there, by kind, as the agent of the node's host saw it


class HostSeen(Event, frozen=True, kw_only=True, tag="HOST_SEEN"):
    host: m.HostName  # from which an agent speaks: the first, or again, or after a boot


class HostRoom(Event, frozen=True, kw_only=True, tag="HOST_ROOM"):
    """What the processes of a host may use of its memory, as an agent there or the coordinator read it."""

    host: str  # key of a HostName
    names: list[str]
    bytes: int
    source: str  # the machine, or the folder of a control group


class HostGone(Event, frozen=True, kw_only=True, tag="HOST_GONE"):
    host: str  # of which the agent was not heard for as long as a lease is good


class OwedPaid(Event, frozen=True, kw_only=True, tag="OWED_PAID"):
    host: str
    uid: str  # of the job of which nothing is left there


class HostReleased(Event, frozen=True, kw_only=True, tag="HOST_RELEASED"):
    host: str  # on which nothing of dying jobs is left, as an operator says


class NodeReleased(Event, frozen=True, kw_only=True, tag="NODE_RELEASED"):
    node: str  # on which nothing of a dying job is left, as an operator says, and where nothing looks


class PoolsChanged(Event, frozen=True, kw_only=True, tag="POOLS_CHANGED"):
    pools: dict[str, Pool]  # of the configuration file, read again; the change is allowed (hosts.py)


class Settled(Event, frozen=True, kw_only=True, tag="SETTLED"):
    """The time for asserting leases after a loss of memory is over."""


class MoveGivenUp(Event, frozen=True, kw_only=True, tag="MOVE_GIVEN_UP"):
    job: str  # which left for other nodes, and has not come back for too long


class MovesDue(Event, frozen=True, kw_only=True, tag="MOVES_DUE"):
    """Moves that did not pay when they were last considered may pay by now."""


class Planned(Event, frozen=True, kw_only=True, tag="PLANNED"):
    """What the planner answers to the first of its questions."""

    version: int  # of the record that the question was asked about; an answer to another one is void
    answer: Answer


_Seen = JobSilent | JobRevoked | PhaseOverdue | JobEvicted | DriverDied | JobExited | ProcessesGone | NodeEmpty | NodesOwed
AboutJob = m.AnyFromJob | _Seen | HostMeasured
AboutHosts = HostSeen | HostRoom | HostGone | OwedPaid | HostReleased | NodeReleased | PoolsChanged
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
