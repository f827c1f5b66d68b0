"""Fencing tokens: how they are numbered, what became of each, and which leases clients claim after a loss of memory.

Runs in the coordinator, called by state.py, registration.py and the journal; pure.

Numbers: (epoch << 32) + counter, so tokens rise from one start of the coordinator to the next, whatever was lost. The epoch is
the number of the start. Below 2 ** 52 a token is exact in JSON and in a double.

Closed tokens: a release says that nothing is done under its token any more, which is true whichever coordinator hears it. So a
token that is not on record counts as given back; only a token that was taken away, or is another job's, is answered with
LEASE_LOST. A request that comes once more after its lease was given back, late from an old connection, is not granted again.

Claims: a coordinator that may not know what its predecessor granted settles: for one lease time it grants nothing, and clients,
which register again with a coordinator that they do not know, claim their leases. Claims are believed about tokens of that time
(`unknown_up_to`), as the predecessor kept leases apart. Where two leases meet on a node the later one is right: the other one
must have ended before the later was granted. A pause of the coordinator does not count, as it hears no client then.
"""

from __future__ import annotations

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import queueing
from verl_mux.coordinator.core.records import Job, Lease, State
from verl_mux.coordinator.core.settings import Config

_COUNTER_BITS = 32
_COUNTED_FROM = 1_767_225_600  # the year 2026; 30 bits of seconds last for 34 years
_PER_SECOND_BITS = 22
LAST_EPOCH = (1 << 20) - 1
# Closed tokens that are remembered of a job: more than it can have releases open.
_REMEMBERED = 64


# --- numbers ---


def before(epoch: int) -> int:
    """Lower than every token of this epoch, and not lower than any of those before."""
    return epoch << _COUNTER_BITS


def at(wall: float) -> int:
    """For a start that knows of no earlier one: higher than the tokens of those before, by the wall clock (epoch seconds)."""
    return int(max(0.0, wall - _COUNTED_FROM)) << _PER_SECOND_BITS


def epoch_of(token: int) -> int:
    return token >> _COUNTER_BITS


# The last token of the last epoch but one: a start must be able to come after it.
LAST = before(LAST_EPOCH) - 1


# --- closed tokens ---


def given_back(job: Job, token: int) -> None:
    _remember(job, token, taken_away=False)


def lost(job: Job, token: int) -> None:
    _remember(job, token, taken_away=True)


def spent(job: Job, key: str) -> None:
    """What was asked for under this key was given back or cancelled."""
    job.spent.append(key)
    del job.spent[:-_REMEMBERED]


def answer(job: Job, token: int, is_anothers: bool) -> m.LeaseReleased | m.LeaseLost:
    """To the release of a token that the job does not hold."""
    if is_anothers or job.closed.get(token):
        return m.LeaseLost(token=token, reason=f"token {token} is stale: the lease was taken away before its release")
    given_back(job, token)  # a claim that comes later, from before the release, must not bring it back
    return m.LeaseReleased(token=token)


def _remember(job: Job, token: int, taken_away: bool) -> None:
    job.closed[token] = taken_away
    while len(job.closed) > _REMEMBERED:
        del job.closed[next(iter(job.closed))]


# --- claims ---


def settle(state: State, config: Config, unknown_up_to: int) -> None:
    """At each start anew: its running time begins at 0."""
    state.settle_until = config.lease_timeout
    state.unknown_up_to = max(state.unknown_up_to, unknown_up_to)


def take_claims(state: State, config: Config, job: Job, what: m.Register, now: float) -> None:
    """Brings the record of the client's leases in line with what it holds, as far as the record may be wrong.

    The answer to each client's next heartbeat says which of its leases were taken over. A registration that comes later than
    one that was sent after it claims nothing.
    """
    if what.number < job.registrations.get(what.client, 0):
        return
    job.registrations[what.client] = what.number
    if what.again and state.settle_until is not None:
        held = {claim.token for claim in what.held}
        gone = [lease for lease in state.leases_of(job.name) if lease.client == what.client and lease.token not in held]
        for lease in gone:
            del state.leases[lease.token]
            given_back(job, lease.token)
    if state.settle_until is not None and what.seen <= state.unknown_up_to:
        _begin_above(state, what.seen)
    for claim in what.held:
        _take_claim(state, config, job, what.client, claim, now)


def _take_claim(state: State, config: Config, job: Job, client: str, claim: m.Claim, now: float) -> None:
    known = state.leases.get(claim.token)
    if (known is not None and known.job == job.name) or claim.token in job.closed:
        return
    against = _met(state, config, claim)
    if known is not None or not _is_believed(state, job, claim) or any(_is_later(lease, claim, state) for lease in against):
        lost(job, claim.token)
        return
    for lease in against:
        del state.leases[lease.token]
        lost(state.jobs[lease.job], lease.token)
    about = {name: getattr(claim, name) for name in ("token", "key", "phase", "step", "nodes")}
    state.leases[claim.token] = Lease(job=job.name, client=client, granted_at=now, **about)
    _begin_above(state, claim.token)


def _begin_above(state: State, token: int) -> None:
    """New tokens are higher than one that a client saw, though the number of this start was lost as well."""
    if token > state.token:
        state.token = before(epoch_of(token) + 1)


def _is_believed(state: State, job: Job, claim: m.Claim) -> bool:
    sound = claim.phase in m.PHASES and bool(claim.nodes) and set(claim.nodes) <= set(job.all_nodes)
    return sound and 0 < claim.token <= state.unknown_up_to


def _is_later(lease: Lease, claim: m.Claim, state: State) -> bool:
    """What was granted since all could speak is later than what is claimed only now, whatever the numbers say."""
    return state.settle_until is None or lease.token > claim.token


def _met(state: State, config: Config, claim: m.Claim) -> list[Lease]:
    """Leases that cannot be held beside the claimed one."""
    if queueing.mode(state, config) == "uncoordinated" and claim.step > 0:
        return []
    return [lease for lease in state.leases.values() if not set(lease.nodes).isdisjoint(claim.nodes)]
