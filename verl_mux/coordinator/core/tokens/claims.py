"""After a loss of memory: what clients say that they hold. Pure.

A coordinator that does not know, or not for sure, what its predecessor granted settles: for one lease time it grants
nothing, and clients, who register again with a coordinator that they do not know, assert their leases. They are
believed about tokens of that time (`unknown_up_to`), as the predecessor kept leases apart. Where two leases meet on a
node, the later one is right: the other one must have ended before it was granted. A pause of the coordinator does not
count, as it hears nobody then.
"""

from __future__ import annotations

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.core import patience, queueing
from verl_mux.coordinator.core.records import Job, Lease, State
from verl_mux.coordinator.core.settings import Config
from verl_mux.coordinator.core.tokens import closing, numbering


def settle(state: State, config: Config, unknown_up_to: int, is_first: bool = False) -> None:
    """At each start anew: its running time begins at 0. `is_first`: nothing is known of an earlier coordinator here."""
    state.settle_until = patience.first_look(config) if is_first else config.lease_timeout
    state.unknown_up_to = max(state.unknown_up_to, unknown_up_to)


def somebody_was_before(state: State, config: Config) -> None:
    """There was an earlier coordinator here after all: a job of it spoke."""
    if state.settle_until is not None:
        state.settle_until = config.lease_timeout


def take(state: State, config: Config, job: Job, what: m.Register, now: float) -> None:
    """Brings the record of the client's leases in line with what it holds, as far as the record may be wrong.

    The answer to each client's next heartbeat tells which of its leases were taken over. A registration that comes later than
    one that was sent after it asserts nothing.
    """
    if what.number < job.registrations.get(what.client, 0):
        return
    job.registrations[what.client] = what.number
    if what.again or what.held or what.seen:
        somebody_was_before(state, config)
    if what.again and state.settle_until is not None:
        held = {claim.token for claim in what.held}
        gone = [lease for lease in state.leases_of(job.name) if lease.client == what.client and lease.token not in held]
        for lease in gone:
            del state.leases[lease.token]
            closing.given_back(job, lease.token)
    if state.settle_until is not None and what.seen <= state.unknown_up_to:
        _begin_above(state, what.seen)
    for claim in what.held:
        _assert(state, config, job, what.client, claim, now)


def _assert(state: State, config: Config, job: Job, client: str, claim: m.Claim, now: float) -> None:
    known = state.leases.get(claim.token)
    if (known is not None and known.job == job.name) or closing.is_closed(job, claim.token):
        return
    against = _met(state, config, claim)
    if known is not None or not _is_believed(state, job, claim) or any(_is_later(lease, claim, state) for lease in against):
        closing.lost(job, claim.token)
        return
    for lease in against:
        del state.leases[lease.token]
        closing.lost(state.jobs[lease.job], lease.token)
    about = {name: getattr(claim, name) for name in ("token", "key", "phase", "step", "nodes")}
    state.leases[claim.token] = Lease(job=job.name, client=client, granted_at=now, **about)
    _begin_above(state, claim.token)


def _begin_above(state: State, token: int) -> None:
    """Tokens rise for everybody who saw one, though the number of this start was lost as well."""
    if token > state.token:
        state.token = numbering.before(numbering.epoch_of(token) + 1)


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
