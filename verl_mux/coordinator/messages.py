"""What travels on the control bus: typed messages, one msgpack map each, told apart by their `type` field.

Every message carries the protocol `version`; another version is refused with a line that names both. Tensors never
travel here. Messages of a job carry its name, its `uid` (one per start of the job, so that a restarted job is not
taken for its predecessor) and the `client` (one per connection; also its ZeroMQ identity).

Two families:
- leases: REGISTER .. JOB_ENDED, between a job's client and the coordinator;
- rollout dispatch: TASK_REQUEST, NEW_TASK, DATA_GENERATED, REWARD_COMPUTED, LEARNER_STATE_UPDATE and MIGRATE.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec

from verl_mux.scheduling.job_needs import JobNeeds

VERSION = 1

SIDES = ("rollout", "train")
PHASES = ("init", *SIDES)
# In place of a side's nodes: the coordinator is to choose them.
AUTO = "auto"


class WrongVersion(ValueError):
    """The other side speaks another protocol version, or no protocol of ours."""


class Message(msgspec.Struct, kw_only=True, frozen=True, tag_field="type"):
    version: int = VERSION


class FromJob(Message, kw_only=True, frozen=True):
    job: str
    uid: str
    client: str


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A process of a job; `started`, its creation time in epoch seconds, tells it from another with a reused pid."""

    host: str
    pid: int
    started: float


class Claim(msgspec.Struct, kw_only=True, frozen=True):
    """A lease that a client holds already and asserts again after it lost the coordinator."""

    token: int
    key: str
    phase: str
    step: int
    nodes: list[str]
    granted_at: float


# --- a job's client to the coordinator -------------------------------------------------------------------------------


class Register(FromJob, kw_only=True, frozen=True, tag="REGISTER"):
    """`nodes` names nodes or whole pools per side; `gpus` is needed on each node of a side (or on one named node).

    With `auto` on both sides the coordinator places the job: by its `needs`, within `slo`, on behalf of `owner`; `placed`
    is where it was placed, if it registers again.
    """

    host: str
    pid: int
    started: float
    nodes: dict[str, list[str]]
    gpus: dict[str, int] = {}
    seed: int = 0
    steps: int | None = None
    members: list[Member] = []
    held: list[Claim] = []
    again: bool = False
    needs: JobNeeds | None = None
    slo: float | None = None
    owner: str = ""
    placed: dict[str, list[str]] = {}

    @property
    def wants_placement(self) -> bool:
        return bool(self.nodes) and all(names == [AUTO] for names in self.nodes.values())


class LeaseRequest(FromJob, kw_only=True, frozen=True, tag="LEASE_REQUEST"):
    """Asks for one phase on all of `nodes` or none. The same `key` sent twice is one request."""

    key: str
    phase: str
    step: int
    nodes: list[str]


class LeaseCancel(FromJob, kw_only=True, frozen=True, tag="LEASE_CANCEL"):
    key: str


class LeaseRelease(FromJob, kw_only=True, frozen=True, tag="LEASE_RELEASE"):
    token: int


class LeaseShrink(FromJob, kw_only=True, frozen=True, tag="LEASE_SHRINK"):
    """Gives some of a lease's nodes back; the rest stays held. Not answered: what is lost goes back with the release."""

    token: int
    nodes: list[str]


class Heartbeat(FromJob, kw_only=True, frozen=True, tag="HEARTBEAT"):
    """`beat` counts from 1; `tokens` are the leases that the client believes it holds."""

    beat: int
    tokens: list[int] = []


class Progress(FromJob, kw_only=True, frozen=True, tag="PROGRESS"):
    """`done` of `total` samples of the rollout that runs under `token` (None: under no lease)."""

    done: int
    total: int
    token: int | None = None


class StepReport(FromJob, kw_only=True, frozen=True, tag="STEP_REPORT"):
    step: int
    metrics: dict[str, float]


class MemoryReport(FromJob, kw_only=True, frozen=True, tag="MEMORY_REPORT"):
    """Device bytes that the job holds on `node` now under these tags; what it said of other tags stands."""

    node: str
    tags: dict[str, int]


class PhaseNote(FromJob, kw_only=True, frozen=True, tag="PHASE_NOTE"):
    note: str


class MemberReport(FromJob, kw_only=True, frozen=True, tag="MEMBER_REPORT"):
    """All device-holding processes of the job; replaces what was reported before."""

    members: list[Member]


class Detach(FromJob, kw_only=True, frozen=True, tag="DETACH"):
    """One more client of the job goes away; the job goes on."""


class Deregister(FromJob, kw_only=True, frozen=True, tag="DEREGISTER"):
    """The job is over and gives everything back."""


class Failing(FromJob, kw_only=True, frozen=True, tag="FAILING"):
    """The job ends with memory still on its nodes: they are given on when its processes are gone, not before."""

    reason: str


class StatusRequest(Message, kw_only=True, frozen=True, tag="STATUS_REQUEST"):
    pass


# --- the coordinator to a client -------------------------------------------------------------------------------------


class Registered(Message, kw_only=True, frozen=True, tag="REGISTERED"):
    """`nodes` with pools spelt out; `cpus` of each node (None: not named); `first`: this client speaks for the job."""

    nodes: dict[str, list[str]]
    cpus: dict[str, list[int] | None]
    lease_timeout: float
    epoch: str
    first: bool


class Queued(Message, kw_only=True, frozen=True, tag="QUEUED"):
    """The job is registered and waits for nodes; `Registered` follows when it has been placed."""

    reason: str
    epoch: str


class Refused(Message, kw_only=True, frozen=True, tag="REFUSED"):
    """`about`: the request's key, or `register`. `retry`: what stands in the way is about to end."""

    about: str
    reason: str
    retry: bool = False


class LeaseGrant(Message, kw_only=True, frozen=True, tag="LEASE_GRANT"):
    key: str
    token: int
    phase: str
    step: int
    nodes: list[str]
    granted_at: float


class LeaseReleased(Message, kw_only=True, frozen=True, tag="LEASE_RELEASED"):
    token: int


class LeaseLost(Message, kw_only=True, frozen=True, tag="LEASE_LOST"):
    token: int
    reason: str


class HeartbeatAck(Message, kw_only=True, frozen=True, tag="HEARTBEAT_ACK"):
    """`queued`: keys of this client's requests that wait. `epoch` differs after each start of the coordinator."""

    beat: int
    epoch: str
    queued: list[str]


class Contended(Message, kw_only=True, frozen=True, tag="CONTENDED"):
    """The job's nodes that another job waits for, pushed at each change."""

    nodes: list[str]


class Unknown(Message, kw_only=True, frozen=True, tag="UNKNOWN"):
    """The coordinator has no memory of this job: register again."""


class JobEnded(Message, kw_only=True, frozen=True, tag="JOB_ENDED"):
    """The coordinator holds this job for dead, finished or gone; nothing it sends counts any more."""

    reason: str


class Status(Message, kw_only=True, frozen=True, tag="STATUS"):
    snapshot: dict[str, Any]


# --- rollout dispatch ------------------------------------------------------------------------------------------------


class TaskRequest(Message, kw_only=True, frozen=True, tag="TASK_REQUEST"):
    """An idle rollout worker asks its scheduler for work."""

    worker_id: str


class NewTask(Message, kw_only=True, frozen=True, tag="NEW_TASK"):
    worker_id: str
    prompt: str | list[int]
    request_id: str = ""
    sampling: dict[str, Any] = {}


class DataGenerated(Message, kw_only=True, frozen=True, tag="DATA_GENERATED"):
    """`num_tokens` response tokens of the sample in buffer slot `slot_id`, made with weights `policy_version`."""

    slot_id: int
    policy_version: int | None = None
    num_tokens: int | None = None


class RewardComputed(Message, kw_only=True, frozen=True, tag="REWARD_COMPUTED"):
    slot_id: int
    reward: float | None = None


class LearnerStateUpdate(Message, kw_only=True, frozen=True, tag="LEARNER_STATE_UPDATE"):
    """Mean policy entropy in nats of the weights `policy_version`."""

    entropy: float
    policy_version: int


class Migrate(Message, kw_only=True, frozen=True, tag="MIGRATE"):
    """Move the named requests, or all when empty, from one rollout worker to another."""

    source: str
    target: str
    request_ids: list[str] = []


LEASING = (
    *(Register, LeaseRequest, LeaseCancel, LeaseRelease, LeaseShrink, Heartbeat, Progress, StepReport, MemoryReport),
    *(PhaseNote, MemberReport, Detach, Deregister, Failing, StatusRequest),
    *(Registered, Queued, Refused, LeaseGrant, LeaseReleased, LeaseLost, HeartbeatAck, Contended, Unknown, JobEnded, Status),
)
DISPATCH = (TaskRequest, NewTask, DataGenerated, RewardComputed, LearnerStateUpdate, Migrate)


class _Head(msgspec.Struct):
    type: str = ""
    version: int = 0


_encoder = msgspec.msgpack.Encoder()
_head_decoder = msgspec.msgpack.Decoder(_Head)
_decoder = msgspec.msgpack.Decoder(Union[(*LEASING, *DISPATCH)])


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(frame: bytes) -> Message:
    """Raises WrongVersion for another protocol version, and for anything that is no message of ours."""
    try:
        head = _head_decoder.decode(frame)
        if head.version != VERSION:
            raise WrongVersion(f"protocol version {head.version} met version {VERSION}: install the same verl-mux on both sides")
        return _decoder.decode(frame)
    except msgspec.DecodeError as error:
        raise WrongVersion(f"not a verl-mux control message of version {VERSION}: {error}") from error
