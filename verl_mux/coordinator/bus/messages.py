"""What travels on the control bus: typed messages, one msgpack map each, named by their `type` field.

Runs in every process that speaks on the bus: trainer, agent, launcher, commands, coordinator; data alone.

Every message carries the protocol `version`; another version is refused with a line that names both. Tensors never travel here.
Messages of a job carry its name, its `uid` (one per start of the job, so that a restarted job is not taken for its predecessor)
and the `client` (one per connection; also its ZeroMQ identity). All may be repeated. Sections below:
- leases: REGISTER .. JOB_ENDED, between a job's client and the coordinator;
- by hand: JOB_OVER, from the launcher of a job; EVICT and FREE, from an operator;
- agents: AGENT_REPORT and AGENT_ANSWER, between the agent of a host and the coordinator;
- the learner: LEARNER_STATE_UPDATE, to the training trigger; prompts, samples and rewards travel by Ray (docs/rollout.md).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from verl_mux.coordinator.bus import limits
from verl_mux.placement.estimator import Observed
from verl_mux.placement.job_needs import JobNeeds
from verl_mux.places.place import Place

VERSION = 3
SIDES = ("rollout", "train")
PHASES = ("init", *SIDES)
# In place of a side's nodes: the coordinator chooses them.
AUTO = "auto"


class Unreadable(ValueError):
    """No message of this protocol, or one beyond the limits. `about`: what a Refused should name, as far as that could be
    read."""

    about = ""


class WrongVersion(Unreadable):
    """The other side speaks another protocol version, or another protocol."""

    about = "register"  # nothing else that it says will be understood either


class Message(msgspec.Struct, kw_only=True, frozen=True, tag_field="type"):
    version: int = VERSION


class FromJob(Message, kw_only=True, frozen=True):
    job: limits.Name
    uid: limits.Name
    client: limits.Name


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A process of a job. `started`, in clock ticks after the boot `boot`, distinguishes it from another with a reused pid.

    Neither moves when the wall clock is set. `space`: the PID namespace in which it has that pid; empty: unknown.
    """

    host: limits.ShownName
    pid: limits.Count
    started: limits.Ticks
    boot: limits.Name
    space: limits.Name = ""


Members = Annotated[list[Member], msgspec.Meta(max_length=4096)]


class Claim(msgspec.Struct, kw_only=True, frozen=True):
    """A lease that a client holds already and asserts again after it lost the coordinator."""

    token: limits.ClaimedToken
    key: limits.Name
    phase: limits.Name
    step: limits.Count
    nodes: limits.Nodes
    granted_at: limits.Seconds


Claims = Annotated[list[Claim], msgspec.Meta(max_length=256)]


# --- leases: a job's client to the coordinator -----------------------------------------------------------------------


class Register(FromJob, kw_only=True, frozen=True, tag="REGISTER"):
    """Asks to be taken as a job, or as one more client of it.

    `nodes`: nodes or whole pools per side; `auto` on both sides: the coordinator places the job by its `needs` or the steps
    `profiled`, within `slo`, and if it is `colocated` on the same nodes for both phases. `gpus`: needed on each node of a side,
    or on one named node. `host_memory`: bytes of the job's states on each node, by side and kind; its processes come on top.
    `space`: the driver's PID namespace.

    `filler`: its requests come behind those of all jobs, and what it holds is called back when a job wants it. `grace`: seconds
    that it may need to give it back, if more than `filler_grace`; `lease_timeout` at most. `movable`: the launcher starts the
    job again, from its newest checkpoint, when it leaves because the coordinator asked it to.

    Of a client that registers `again`: `placed` is where the job was placed, `first` that it was the job's first, `held` the
    leases it asserts, `seen` the highest token that it was ever granted. `number`: of this registration of the client, so that
    it recognises the answer to the newest one.
    """

    job: limits.ShownName
    uid: limits.ShownName
    client: limits.ShownName
    host: limits.ShownName
    pid: limits.Count
    started: limits.Ticks
    boot: limits.Name = ""
    space: limits.Name = ""
    nodes: limits.Sides
    gpus: limits.Gpus = {}
    host_memory: limits.HostMemory = {}
    seed: limits.Seed = 0
    steps: limits.Count | None = None
    members: Members = []
    held: Claims = []
    seen: limits.Token = 0
    number: limits.Count = 0
    again: bool = False
    first: bool = False
    needs: JobNeeds | None = None
    slo: limits.Factor | None = None
    placed: limits.Sides = {}
    profiled: Observed = Observed()
    filler: bool = False
    grace: limits.Seconds = 0.0
    movable: bool = False
    colocated: bool = False

    @property
    def driver(self) -> Member:
        return Member(self.host, self.pid, self.started, self.boot, self.space)

    @property
    def wants_placement(self) -> bool:
        return bool(self.nodes) and all(names == [AUTO] for names in self.nodes.values())


class LeaseRequest(FromJob, kw_only=True, frozen=True, tag="LEASE_REQUEST"):
    """Asks for one phase on all of `nodes` or none. The same `key` sent twice is one request. `number`: of the client's last
    registration; a request from before a newer one is late, and is asked again if it is still open.

    A filler asks for any `num_nodes` of them, as soon as no job wants them; with `least`, not before they can be expected to
    stay free for that many seconds.
    """

    key: limits.Name
    phase: limits.Name
    step: limits.Step
    nodes: limits.Nodes
    number: limits.Count = 0
    num_nodes: limits.Count = 0
    least: limits.Seconds = 0.0


class LeaseCancel(FromJob, kw_only=True, frozen=True, tag="LEASE_CANCEL"):
    """The client does not want the lease of this key any more, granted or not."""

    key: limits.Name


class LeaseRelease(FromJob, kw_only=True, frozen=True, tag="LEASE_RELEASE"):
    """Nothing is done under this token any more. The same one sent twice is one release."""

    token: limits.Token


class LeaseShrink(FromJob, kw_only=True, frozen=True, tag="LEASE_SHRINK"):
    """Gives some of a lease's nodes back; the rest stays held. The same `key` sent twice is one."""

    key: limits.Name
    token: limits.Token
    nodes: limits.Nodes


class Heartbeat(FromJob, kw_only=True, frozen=True, tag="HEARTBEAT"):
    """`beat` counts from 1; `tokens` are the leases that the client believes it holds."""

    beat: limits.Beat
    tokens: limits.Tokens = []


class Progress(FromJob, kw_only=True, frozen=True, tag="PROGRESS"):
    """`done` of `total` samples of the rollout that runs under `token` (None: under no lease)."""

    done: limits.Count
    total: limits.Count
    token: limits.Token | None = None


class StepReport(FromJob, kw_only=True, frozen=True, tag="STEP_REPORT"):
    """`step` is finished. `steps`: of the job in all, which it may not have known when it registered."""

    step: limits.Count
    metrics: limits.Metrics
    steps: limits.Count | None = None


class MemoryReport(FromJob, kw_only=True, frozen=True, tag="MEMORY_REPORT"):
    """Device bytes that the job holds on `node` now under these tags; earlier reports of other tags stand."""

    node: limits.Name
    tags: limits.Tags


class HostReport(FromJob, kw_only=True, frozen=True, tag="HOST_REPORT"):
    """Host memory of the job's processes on `node` now, by kind; replaces the report of that node before."""

    node: limits.Name
    bytes: limits.Tags


class PhaseNote(FromJob, kw_only=True, frozen=True, tag="PHASE_NOTE"):
    note: limits.Text


class MemberReport(FromJob, kw_only=True, frozen=True, tag="MEMBER_REPORT"):
    """All device-holding processes of the job; replaces what was reported before."""

    members: Members


class Detach(FromJob, kw_only=True, frozen=True, tag="DETACH"):
    """One more client of the job goes away; the job goes on."""


class Deregister(FromJob, kw_only=True, frozen=True, tag="DEREGISTER"):
    """The job is over and gives everything back. `reason`: why, if it has not simply finished.

    `moving`: the number of the move for which it leaves, to come back under its name; it has saved after `step`, which took
    `saving_s` seconds of that step.
    """

    reason: limits.Text = ""
    moving: limits.Count = 0
    step: limits.Count = 0
    saving_s: limits.Seconds = 0.0


class Failing(FromJob, kw_only=True, frozen=True, tag="FAILING"):
    """The job ends with memory still on its nodes: they are granted again when its processes are gone, not before."""

    reason: limits.Text


class StatusRequest(Message, kw_only=True, frozen=True, tag="STATUS_REQUEST"):
    pass


# --- leases: the coordinator to a client -----------------------------------------------------------------------------


class Registered(Message, kw_only=True, frozen=True, tag="REGISTERED"):
    """`nodes` with pools spelt out; `places`: where each of them is; `first`: this client speaks for the job. `answers`: the
    registration with that number; 0: none, it was queued and has been placed. `filler_grace`: seconds that a filler has to
    leave; None: the coordinator does not know fillers."""

    nodes: dict[str, list[str]]
    places: dict[str, Place]
    lease_timeout: float
    epoch: str
    first: bool
    answers: int = 0
    filler_grace: float | None = None


class Queued(Message, kw_only=True, frozen=True, tag="QUEUED"):
    """The job is registered and waits for nodes; `Registered` follows when it has been placed."""

    reason: str
    epoch: str
    answers: int = 0


class Refused(Message, kw_only=True, frozen=True, tag="REFUSED"):
    """`about`: the request's key, or `register`. `retry`: what stands in the way is about to end."""

    about: str
    reason: str
    retry: bool = False


class LeaseGrant(Message, kw_only=True, frozen=True, tag="LEASE_GRANT"):
    """`epoch`: of the coordinator that granted; a later one without memory knows nothing of it."""

    epoch: str
    key: str
    token: int
    phase: str
    step: int
    nodes: list[str]
    granted_at: float


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
    """`queued`: keys of this client's requests that wait, `register` among them while its job waits for nodes. `tokens`: those
    of the beat that the coordinator holds for the client's too. `epoch` differs after each start of the coordinator. `move`:
    the number of the move that the job is to make, with each answer until it leaves; 0: none."""

    beat: int
    epoch: str
    queued: list[str]
    tokens: list[int] = []
    move: int = 0


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
    """`text`: what was done, for people."""

    text: str


class Status(Message, kw_only=True, frozen=True, tag="STATUS"):
    snapshot: dict[str, Any]


# --- by hand ---------------------------------------------------------------------------------------------------------


class JobOver(Message, kw_only=True, frozen=True, tag="JOB_OVER"):
    """The driver of this start of the job (its `uid`) ended. Answered with JobEnded, or Unknown while another start runs. Where
    jobs are expected (`expect_jobs`), one that never registered counts as arrived."""

    job: limits.ShownName
    uid: limits.Name


class Evict(Message, kw_only=True, frozen=True, tag="EVICT"):
    """End this job as if it had failed. Answered with Done or Refused."""

    job: limits.Name


class Free(Message, kw_only=True, frozen=True, tag="FREE"):
    """Nothing is left of jobs that ended where no agent looks: of the job `name`, or on that node or host. As Evict."""

    name: limits.Name


# --- agents ----------------------------------------------------------------------------------------------------------
# One question, one answer; both may be lost, doubled or late. A look counts for a job only if the agent was asked for it, and it
# is asked for a job only once that one is dying: so no look that began before the death counts as one after it.

Source = Literal["nvml", "ledger", "unknown"]
# kube-proxy in its IPVS mode gives every host the addresses of all services of its cluster.
MOST_ADDRESSES = 4096


class HostName(msgspec.Struct, frozen=True):
    """A machine, or a part of it with process ids of its own: `space` names its PID namespace, `boot` the boot of its kernel."""

    name: limits.Name
    addresses: Annotated[list[limits.Name], msgspec.Meta(max_length=MOST_ADDRESSES)]
    boot: limits.Name
    space: limits.Name

    @property
    def key(self) -> str:
        return f"{self.name}/{self.space}"

    @property
    def names(self) -> list[str]:
        """All by which a configuration may call it."""
        return list(dict.fromkeys([self.name, *self.addresses]))


class Look(msgspec.Struct, frozen=True):
    """Which processes of the job with this uid live there: those asked for, and all that carry its mark."""

    uid: limits.Name
    alive: Members


class Holder(msgspec.Struct, frozen=True):
    """A process that carries a job's mark: the device bytes that it holds, by node, and those of host memory, by kind."""

    uid: limits.Name
    member: Member
    bytes: limits.Tags = {}
    host: limits.Tags = {}


class AgentReport(Message, kw_only=True, frozen=True, tag="AGENT_REPORT"):
    """What an agent sees; also the question what to look for. `agent`: its ZeroMQ identity; `number` counts its reports.
    `source`: of the device memory of processes. `looks`, `dead`: what the last answer asked for. `others`: device bytes of
    processes without a mark, by node. Host memory in bytes."""

    agent: limits.Name
    number: limits.Beat
    host: HostName
    source: Source
    looks: Annotated[list[Look], msgspec.Meta(max_length=1024)] = []
    dead: Members = []
    holders: Annotated[list[Holder], msgspec.Meta(max_length=4096)] = []
    others: limits.Tags = {}
    memory_free: limits.Bytes = 0
    memory_total: limits.Bytes = 0


class NodeHere(msgspec.Struct, frozen=True):
    """A node of the host: which of its GPUs it is (None: all), and which job holds a lease on it."""

    gpu_ids: list[int] | None = None
    job: str = ""
    phase: str = ""
    token: int = 0


class AgentAnswer(Message, kw_only=True, frozen=True, tag="AGENT_ANSWER"):
    """To the report `number`. `again_s`: report again after that many seconds. `look_for`: jobs that are dying, by uid, with
    processes that are known of them there. `drivers`: report which of them are dead. `end`: uids whose processes are to be
    ended. `jobs`: names of the uids in the report."""

    number: int
    epoch: str
    again_s: float
    look_for: dict[str, list[Member]] = {}
    drivers: list[Member] = []
    end: list[str] = []
    nodes: dict[str, NodeHere] = {}
    jobs: dict[str, str] = {}


# --- the learner -----------------------------------------------------------------------------------------------------


class LearnerStateUpdate(Message, kw_only=True, frozen=True, tag="LEARNER_STATE_UPDATE"):
    """Mean policy entropy in nats of the weights `policy_version`."""

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
    """Raises WrongVersion for another protocol version and for no protocol at all, Unreadable for fields that are wrong."""
    try:
        head = _head_decoder.decode(frame)
    except Exception as error:
        raise WrongVersion(f"not a verl-mux control message of version {VERSION}: {error}") from error
    if head.version != VERSION:
        raise WrongVersion(f"protocol version {head.version} met version {VERSION}: install the same verl-mux on both sides")
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
    for pattern in (limits.PLAIN_NAME, limits.PLAIN_TEXT):
        words = words.replace(f"matching regex {pattern!r}", "without control characters")
    return words
