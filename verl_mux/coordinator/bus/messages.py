"""What travels on the control bus: typed messages, one msgpack map each, named by their `type` field.

Runs in every process that speaks on the bus: trainer, agent, launcher, commands, coordinator; data alone.

Every message carries the protocol `version`; another version is refused with a line that names both. Tensors never travel here.
Messages of a job carry its name, its `uid` (one per start of the job, so that a restarted job is not taken for its predecessor)
and the `client` (one per connection; also its ZeroMQ identity). All may be repeated. What is beyond the limits of a field's type
is refused when it is decoded, before anything of it is kept: the limits are far above what jobs need, and low enough that no
sender costs the coordinator more than a little memory and time.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from verl_mux.placement.estimator import JobNeeds, Observed
from verl_mux.places.place import Place

VERSION = 3
SIDES = ("rollout", "train")
PHASES = ("init", *SIDES)
# In place of a side's nodes: the coordinator chooses them.
AUTO = "auto"

# --- limits ----------------------------------------------------------------------------------------------------------

FRAME_BYTES = 2**20
# Answers that wait for a client that does not read; further ones are dropped, and it asks again.
QUEUE_PER_CLIENT = 100
# Messages of a client taken off the network before they are read; further ones wait at the client.
UNREAD_PER_CLIENT = 16

JOBS = 20_000
ENDED_JOBS_REMEMBERED = 1_000
CLIENTS_OF_A_JOB = 256
REQUESTS_OF_A_JOB = 64
# What a job may send, which is written to the journal.
BYTES_PER_S, BYTES_AT_ONCE = 2**18, 2**22
RECORD_BYTES = 2**26  # of all records together; beyond it a job may only hold its even share
TAGS_ON_A_NODE = 64
# kube-proxy in its IPVS mode gives every host the addresses of all services of its cluster.
MOST_ADDRESSES = 4096
MOST_PROCESSES = 4096

Name = Annotated[str, Meta(max_length=256)]
Id = Annotated[str, Meta(min_length=1, max_length=256)]  # what is known by none is not on record under an empty name
# Texts that `status` shows hold nothing that terminals act upon (C0, but for tab and newline in texts, DEL, C1) or that turns
# the direction of writing. Checked where they come in: names in a job's other messages must be those it registered.
_ALWAYS_REFUSED = r"\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069"
_PLAIN_NAME = rf"\A[^\x00-\x0a{_ALWAYS_REFUSED}]*\Z"
_PLAIN_TEXT = rf"\A[^\x00-\x08{_ALWAYS_REFUSED}]*\Z"
ShownName = Annotated[str, Meta(max_length=256, pattern=_PLAIN_NAME)]
ShownId = Annotated[str, Meta(min_length=1, max_length=256, pattern=_PLAIN_NAME)]
Text = Annotated[str, Meta(max_length=4096, pattern=_PLAIN_TEXT)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
# The state machine refuses a negative step, in better words.
Step = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
# Tokens count on from the highest that a job claims to hold, so a claim stays far below what a message can carry.
Token = Annotated[int, Meta(ge=0, le=2**62)]
ClaimedToken = Annotated[int, Meta(ge=0, le=2**53)]
Beat = Annotated[int, Meta(ge=0, le=2**53)]
# The sum over all jobs and tags still fits in 63 bits.
Bytes = Annotated[int, Meta(ge=-(2**43), le=2**43)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]  # since 1970; excludes infinity and NaN too
Ticks = Annotated[int, Meta(ge=0, le=2**62)]
Factor = Annotated[float, Meta(ge=0, le=1e6)]
Nodes = Annotated[list[Name], Meta(max_length=4096)]
Sides = Annotated[dict[Name, Nodes], Meta(max_length=8)]
Gpus = Annotated[dict[Name, Count], Meta(max_length=4096)]
Metrics = Annotated[dict[ShownName, float], Meta(max_length=64)]
Tags = Annotated[dict[ShownName, Bytes], Meta(max_length=TAGS_ON_A_NODE)]
HostMemory = Annotated[dict[Name, dict[ShownName, Annotated[int, Meta(ge=0, le=2**43)]]], Meta(max_length=8)]


class Unreadable(ValueError):
    """No message of this protocol and version, or one beyond the limits. `about`: what a Refused should name; of another
    protocol, where nothing else will be understood either, the registration."""

    about = "register"


class Message(msgspec.Struct, kw_only=True, frozen=True, tag_field="type"):
    version: int = VERSION


class FromJob(Message, kw_only=True, frozen=True):
    job: Id
    uid: Id
    client: Id


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A process of a job. `started`, in clock ticks after the boot `boot`, distinguishes it from another with a reused pid.

    Neither moves when the wall clock is set. `space`: the PID namespace in which it has that pid; empty: unknown.
    """

    host: ShownName
    pid: Count
    started: Ticks
    boot: Name
    space: Name = ""


Members = Annotated[list[Member], Meta(max_length=MOST_PROCESSES)]


class Claim(msgspec.Struct, kw_only=True, frozen=True):
    """A lease that a client holds already and asserts again after it lost the coordinator. `granted`, `proof`: as in the grant;
    of the nodes some may have been given back since."""

    token: ClaimedToken
    key: Name
    phase: Name
    step: Count
    nodes: Nodes
    granted_at: Seconds
    granted: Nodes = []
    proof: Annotated[bytes, Meta(max_length=64)] = b""


# --- leases: a job's client to the coordinator -----------------------------------------------------------------------


class Register(FromJob, kw_only=True, frozen=True, tag="REGISTER"):
    """Asks to be taken as a job, or as one more client of it."""

    job: ShownId
    uid: ShownId
    client: ShownId
    # Of the driver.
    host: ShownName
    pid: Count
    started: Ticks
    boot: Name = ""
    space: Name = ""
    # Nodes or whole pools per side; `auto` on both sides: the coordinator places the job by its `needs` or the steps `profiled`,
    # within `slo` (how many times its iteration alone an iteration may last), and if it is `colocated` on the same nodes for both
    # phases.
    nodes: Sides
    gpus: Gpus = {}  # needed on each node of a side, or on one named node
    host_memory: HostMemory = {}  # bytes of the job's states on each node, by side and kind; its processes come on top
    seed: Seed = 0
    steps: Count | None = None  # in all
    members: Members = []
    needs: JobNeeds | None = None
    slo: Factor | None = None
    profiled: Observed = Observed()
    colocated: bool = False
    # Its requests come behind those of all jobs, and what it holds is called back when a job wants it. `grace`: seconds that it
    # may need to give it back, if more than `filler_grace`; `lease_timeout` at most.
    filler: bool = False
    grace: Seconds = 0.0
    # The launcher starts the job again, from its newest checkpoint, when it leaves because the coordinator asked it to.
    movable: bool = False
    # Of a client that registers `again`: where the job was placed, whether it was the job's first, the leases it asserts, and the
    # highest token that it was ever granted.
    again: bool = False
    placed: Sides = {}
    first: bool = False
    held: Annotated[list[Claim], Meta(max_length=256)] = []
    seen: Token = 0
    # Of this registration of the client, so that it recognises the answer to the newest one.
    number: Count = 0

    @property
    def driver(self) -> Member:
        return Member(self.host, self.pid, self.started, self.boot, self.space)

    @property
    def wants_placement(self) -> bool:
        return bool(self.nodes) and all(names == [AUTO] for names in self.nodes.values())


class LeaseRequest(FromJob, kw_only=True, frozen=True, tag="LEASE_REQUEST"):
    """Asks for one phase on all of `nodes` or none. The same `key` sent twice is one request. `number`: of the client's last
    registration; a request from before a newer one is late, and is asked again if it is still open.

    A filler asks for any `num_nodes` of them, as soon as no job wants them.
    """

    key: Name
    phase: Name
    step: Step
    nodes: Nodes
    number: Count = 0
    num_nodes: Count = 0


class LeaseCancel(FromJob, kw_only=True, frozen=True, tag="LEASE_CANCEL"):
    key: Name  # its lease is not wanted any more, granted or not


class LeaseRelease(FromJob, kw_only=True, frozen=True, tag="LEASE_RELEASE"):
    token: Token  # nothing is done under it any more; the same one sent twice is one release


class LeaseShrink(FromJob, kw_only=True, frozen=True, tag="LEASE_SHRINK"):
    """Gives some of a lease's nodes back; the rest stays held. The same `key` sent twice is one."""

    key: Name
    token: Token
    nodes: Nodes


class Heartbeat(FromJob, kw_only=True, frozen=True, tag="HEARTBEAT"):
    beat: Beat  # counts from 1
    tokens: Annotated[list[Token], Meta(max_length=256)] = []  # of the leases that the client believes it holds


class Progress(FromJob, kw_only=True, frozen=True, tag="PROGRESS"):
    """`done` of `total` samples of the rollout that runs under `token` (None: under no lease)."""

    done: Count
    total: Count
    token: Token | None = None


class StepReport(FromJob, kw_only=True, frozen=True, tag="STEP_REPORT"):
    """`step` is finished. `steps`: of the job in all, which it may not have known when it registered."""

    step: Count
    metrics: Metrics
    steps: Count | None = None


class MemoryReport(FromJob, kw_only=True, frozen=True, tag="MEMORY_REPORT"):
    """Device bytes that the job holds on `node` now under these tags; earlier reports of other tags stand."""

    node: Name
    tags: Tags


class HostReport(FromJob, kw_only=True, frozen=True, tag="HOST_REPORT"):
    """Host memory of the job's processes on `node` now, by kind; replaces the report of that node before."""

    node: Name
    bytes: Tags


class PhaseNote(FromJob, kw_only=True, frozen=True, tag="PHASE_NOTE"):
    note: Text


class MemberReport(FromJob, kw_only=True, frozen=True, tag="MEMBER_REPORT"):
    members: Members  # all device-holding processes of the job, in place of those reported before


class Detach(FromJob, kw_only=True, frozen=True, tag="DETACH"):
    """One more client of the job goes away; the job goes on."""


class Deregister(FromJob, kw_only=True, frozen=True, tag="DEREGISTER"):
    """The job is over and gives everything back. `reason`: why, if it has not simply finished.

    `moving`: the number of the move for which it leaves, to come back under its name; it has saved after `step`, which took
    `saving_s` seconds of that step.
    """

    reason: Text = ""
    moving: Count = 0
    step: Count = 0
    saving_s: Seconds = 0.0


class Failing(FromJob, kw_only=True, frozen=True, tag="FAILING"):
    """The job ends with memory still on its nodes: they are granted again when its processes are gone, not before."""

    reason: Text


class StatusRequest(Message, kw_only=True, frozen=True, tag="STATUS_REQUEST"):
    pass


# --- leases: the coordinator to a client -----------------------------------------------------------------------------


class Registered(Message, kw_only=True, frozen=True, tag="REGISTERED"):
    nodes: dict[str, list[str]]  # with pools spelt out
    places: dict[str, Place]  # where each of them is
    lease_timeout: float
    epoch: str
    first: bool  # this client speaks for the job
    answers: int = 0  # the registration with that number; 0: none, it was queued and has been placed
    filler_grace: float | None = None  # seconds that a filler has to leave; None: the coordinator does not know fillers


class Queued(Message, kw_only=True, frozen=True, tag="QUEUED"):
    """The job is registered and waits for nodes; `Registered` follows when it has been placed."""

    reason: str
    epoch: str
    answers: int = 0


class Refused(Message, kw_only=True, frozen=True, tag="REFUSED"):
    about: str  # the request's key, or `register`
    reason: str
    retry: bool = False  # what stands in the way is about to end


class LeaseGrant(Message, kw_only=True, frozen=True, tag="LEASE_GRANT"):
    epoch: str  # of the coordinator that granted; a later one without memory knows nothing of it
    key: str
    token: int
    phase: str
    step: int
    nodes: list[str]
    granted_at: float
    granted: list[str] = []  # the nodes that `proof` is about
    proof: bytes = b""  # by which the coordinator, or one with its keys, knows that it granted this, whatever it has lost


class LeaseReleased(Message, kw_only=True, frozen=True, tag="LEASE_RELEASED"):
    token: int


class LeaseLost(Message, kw_only=True, frozen=True, tag="LEASE_LOST"):
    """Answers a release: the lease had been taken away before."""

    token: int
    reason: str


class LeaseCancelled(Message, kw_only=True, frozen=True, tag="LEASE_CANCELLED"):
    key: str


class LeaseShrunk(Message, kw_only=True, frozen=True, tag="LEASE_SHRUNK"):
    key: str


class HeartbeatAck(Message, kw_only=True, frozen=True, tag="HEARTBEAT_ACK"):
    beat: int
    epoch: str  # differs after each start of the coordinator
    queued: list[str]  # keys of this client's requests that wait, `register` among them while its job waits for nodes
    tokens: list[int] = []  # those of the beat that the coordinator holds for the client too
    move: int = 0  # the number of the move that the job is to make, with each answer until it leaves; 0: none


class Contended(Message, kw_only=True, frozen=True, tag="CONTENDED"):
    """The job's nodes that another job waits for, pushed at each change, and to a filler with each heartbeat's answer, for it
    must leave those that it holds. `gangs`: sets of nodes that the job holds under a lease of several; if all of one came back
    another job would begin."""

    nodes: list[str]
    gangs: list[list[str]] = []


class Unknown(Message, kw_only=True, frozen=True, tag="UNKNOWN"):
    """The coordinator has no memory of this job: register again."""


class JobEnded(Message, kw_only=True, frozen=True, tag="JOB_ENDED"):
    """The coordinator holds this job for dead, finished or gone; nothing it sends counts any more."""

    reason: str


class Done(Message, kw_only=True, frozen=True, tag="DONE"):
    text: str  # what was done, for people


class Status(Message, kw_only=True, frozen=True, tag="STATUS"):
    snapshot: dict[str, Any]


# --- by hand ---------------------------------------------------------------------------------------------------------


class JobOver(Message, kw_only=True, frozen=True, tag="JOB_OVER"):
    """From a launcher: the driver of this start of the job (its `uid`) ended. Answered with JobEnded, or Unknown while another
    start runs. Where jobs are expected (`expect_jobs`), one that never registered counts as arrived."""

    job: ShownId
    uid: Id


class Evict(Message, kw_only=True, frozen=True, tag="EVICT"):
    """From an operator: end this job as if it had failed. Answered with Done or Refused."""

    job: Name


class Free(Message, kw_only=True, frozen=True, tag="FREE"):
    """From an operator: nothing is left of jobs that ended where no agent looks: of the job `name`, or on that node or host."""

    name: Name


# --- agents ----------------------------------------------------------------------------------------------------------
# One question, one answer; both may be lost, doubled or late. A look counts for a job only if the agent was asked for it, and it
# is asked for a job only once that one is dying: so no look that began before the death counts as one after it.

Source = Literal["nvml", "ledger", "unknown"]


class HostName(msgspec.Struct, frozen=True):
    """A machine, or a part of it with process ids of its own: `space` names its PID namespace, `boot` the boot of its kernel."""

    name: Name
    addresses: Annotated[list[Name], Meta(max_length=MOST_ADDRESSES)]
    boot: Name
    space: Name

    @property
    def key(self) -> str:
        return f"{self.name}/{self.space}"

    @property
    def names(self) -> list[str]:
        """All by which a configuration may call it."""
        return list(dict.fromkeys([self.name, *self.addresses]))


class Look(msgspec.Struct, frozen=True):
    """Which processes of the job with this uid live there: those asked for, and all that carry its mark."""

    uid: Name
    alive: Members


class Holder(msgspec.Struct, frozen=True):
    """A process that carries a job's mark: the device bytes that it holds, by node, and those of host memory, by kind."""

    uid: Name
    member: Member
    bytes: Tags = {}
    host: Tags = {}


class AgentReport(Message, kw_only=True, frozen=True, tag="AGENT_REPORT"):
    """What an agent sees; also the question what to look for. `agent`: its ZeroMQ identity; `number` counts its reports.
    `source`: of the device memory of processes. `looks`, `dead`: what the last answer asked for. `others`: device bytes of
    processes without a mark, by node. Host memory in bytes, and what limits it."""

    agent: Name
    number: Beat
    host: HostName
    source: Source
    looks: Annotated[list[Look], Meta(max_length=1024)] = []
    dead: Members = []
    holders: Annotated[list[Holder], Meta(max_length=MOST_PROCESSES)] = []
    others: Tags = {}
    memory_free: Bytes = 0
    memory_total: Bytes = 0
    memory_source: Text = ""


class NodeHere(msgspec.Struct, frozen=True):
    """A node of the host: which of its GPUs it is (None: all), and which job holds a lease on it."""

    gpu_ids: list[int] | None = None
    job: str = ""
    phase: str = ""
    token: int = 0


class AgentAnswer(Message, kw_only=True, frozen=True, tag="AGENT_ANSWER"):
    number: int  # of the report that it answers
    epoch: str
    again_s: float  # report again after these seconds
    look_for: dict[str, list[Member]] = {}  # jobs that are dying, by uid, with processes that are known of them there
    drivers: list[Member] = []  # report which of them are dead
    end: list[str] = []  # uids whose processes are to be ended
    nodes: dict[str, NodeHere] = {}
    jobs: dict[str, str] = {}  # names of the uids in the report


class LearnerStateUpdate(Message, kw_only=True, frozen=True, tag="LEARNER_STATE_UPDATE"):
    """To the training trigger (docs/rollout.md): mean policy entropy in nats of the weights `policy_version`."""

    entropy: float
    policy_version: int


# --- on the wire -----------------------------------------------------------------------------------------------------

# fmt: off
AnyFromJob = (
    Register | LeaseRequest | LeaseCancel | LeaseRelease | LeaseShrink | Heartbeat | Progress | StepReport | MemoryReport
    | HostReport | PhaseNote | MemberReport | Detach | Deregister | Failing
)
_ToJob = (
    Registered | Queued | Refused | LeaseGrant | LeaseReleased | LeaseLost | LeaseCancelled | LeaseShrunk | HeartbeatAck
    | Contended | Unknown | JobEnded | Done | Status
)
# fmt: on
ByHand = Evict | Free
AnyMessage = AnyFromJob | StatusRequest | JobOver | ByHand | AgentReport | AgentAnswer | _ToJob | LearnerStateUpdate


class _Head(msgspec.Struct):
    type: str = ""
    version: int = 0
    key: str = ""


_encoder = msgspec.msgpack.Encoder()
_head_decoder = msgspec.msgpack.Decoder(_Head)
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(frame: bytes) -> AnyMessage:
    """Raises Unreadable for another protocol version, for no protocol at all, and for fields that are wrong."""
    try:
        head = _head_decoder.decode(frame)
    except Exception as error:
        raise Unreadable(f"not a verl-mux control message of version {VERSION}: {error}") from error
    if head.version != VERSION:
        raise Unreadable(f"protocol version {head.version} met version {VERSION}: install the same verl-mux on both sides")
    try:
        return _decoder.decode(frame)
    except Exception as error:  # fed by strangers, a decoder raises more than what it documents
        kind = "".join(letter if letter.isprintable() else "?" for letter in head.type[:40])
        refused = Unreadable(f"{kind}: {_in_words(error)}")
        refused.about = "register" if head.type == "REGISTER" else head.key or head.type
        raise refused from error


def asks_about(message: AnyMessage | None) -> str:
    """What a Refused should name that answers the message: the key of a question, or its type."""
    if message is None or isinstance(message, Register):
        return "register"
    return getattr(message, "key", "") or str(message.__struct_config__.tag)


def _in_words(error: Exception) -> str:
    words = str(error)
    for pattern in (_PLAIN_NAME, _PLAIN_TEXT):
        words = words.replace(f"matching regex {pattern!r}", "without control characters")
    return words
