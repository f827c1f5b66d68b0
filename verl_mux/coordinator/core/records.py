"""What the coordinator remembers: jobs, requests, leases, and where the schedule stands. Plain data, no behaviour.

Kept in the coordinator; the core alone changes it, the journal writes it.

All of it is msgspec structs, so a snapshot for the journal is one encode, and two histories are compared with `==`.
What can be derived is not stored: a node is free when no lease names it; a lease is being reclaimed when its job is
SILENT or DYING.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from verl_mux.coordinator.bus.messages import Member
from verl_mux.placement.estimator import Observed
from verl_mux.placement.planner import Question, Record


class JobState(Enum):
    LIVE = "live"  # heard from within the lease timeout
    SILENT = "silent"  # not heard from, driver not known to be dead: nodes stay taken, a sign of life restores it
    DYING = "dying"  # driver dead or said to be: nodes stay taken until the last process is gone
    ENDED = "ended"  # holds nothing


class Watched(msgspec.Struct, kw_only=True):
    """What placement learns of a job that it placed. `steps`: the last step seen, by phase. `began`: first rollout asked
    for. `free_since`: it neither holds nor asks for nodes since then; `between`: seconds of that in this step.
    `move_s`: what its last move took.
    `alone_s`: what its finished steps took without waiting, `step_s`: the same of the step that it is in.
    `fresh`: steps seen since its co-execution group changed. `doing`: the phase that it is in or waits for (asked for or, if it
    runs, granted at this time). `rank`: among those of its group that wait, see
    ORDERS in placement/rules.py. `because`: why it is where it is, the end of a sentence."""

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
    see tokens.py. `longest`: seconds by phase; `overdue`: tokens whose phases take far longer. `last`: seconds of the last one,
    by phase. `condemned`: why its nodes were taken away, which ends its driver too. `filler`: see fillers.py; it has no steps,
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
