"""Who waits for which node, who holds it, whose it is: an index over the records, so that an event costs what it changes.

What may be granted, and which nodes are contended, is defined in `queueing`, over all requests. Here the same is found by
looking only at nodes where something changed since the last time: there somebody asked, gave up, got or gave back a lease,
or began or ceased to be held back. Derived: made from the records at the start, after that told of every change. If it was
not told of one it notices by the number of records, and is made anew.
"""

from __future__ import annotations

from collections import defaultdict

from verl_mux.coordinator.core import queueing
from verl_mux.coordinator.core.fillers import granting
from verl_mux.coordinator.core.records import Job, Lease, Request, State
from verl_mux.coordinator.core.settings import Config

# Who wants a node: nobody, one job, or several. More need not be known to tell a job whether another one does.
_SEVERAL = ("", "")


class Waiting:
    """Told of changes as they are made -> `grantable` -> `contended`, which ends the round."""

    def __init__(self, state: State, config: Config) -> None:
        self.config = config
        self._make(state)

    def _make(self, state: State) -> None:
        self.state = state
        self._arrived = 0
        self._arrival: dict[tuple[str, str], int] = {}
        self._by_job: defaultdict[str, dict[str, Request]] = defaultdict(dict)
        self._by_client: defaultdict[str, dict[tuple[str, str], None]] = defaultdict(dict)
        self._queue: defaultdict[str, dict[tuple[str, str], Request]] = defaultdict(dict)  # of jobs only
        self._fillers: dict[tuple[str, str], Request] = {}
        self._job_by_token: dict[int, str] = {}
        self._held: dict[int, list[str]] = {}
        self._tokens_of: defaultdict[str, dict[int, None]] = defaultdict(dict)
        self._holders: defaultdict[str, dict[int, None]] = defaultdict(dict)
        self._nodes_of: dict[str, list[str]] = {}
        self._jobs_on: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._job_by_uid: dict[str, str] = {}
        self._uid_of: dict[str, str] = {}
        self._wanted_by: dict[str, tuple[str, ...]] = {}
        self._rules: tuple[bool, bool, int] | None = None
        self._nodes: set[str] = set()  # where something changed
        self._jobs: set[str] = set()  # of which something changed
        for job in state.jobs.values():
            self.moved(job)
        for lease in state.leases.values():
            self.granted(lease)
        for request in state.requests:
            self.asked(request)

    def follow(self, state: State) -> None:
        """To be called before anything is asked: the records may have been replaced, or changed behind our back."""
        known = (len(self._arrival), len(self._job_by_token), len(self._nodes_of))
        if state is not self.state or known != (len(state.requests), len(state.leases), len(state.jobs)):
            self._make(state)

    # --- what is there ---

    def queued_by(self, client: str) -> list[str]:
        """Keys of the client's requests."""
        return [key for _, key in self._by_client.get(client, ())]

    def request(self, job: str, key: str) -> Request | None:
        return self._by_job.get(job, {}).get(key)

    def requests_of(self, job: str) -> list[Request]:
        return list(self._by_job.get(job, {}).values())

    def leases_of(self, job: str) -> list[Lease]:
        return [self.state.leases[token] for token in self._tokens_of.get(job, ())]

    def started_as(self, uid: str) -> Job | None:
        """The job that registered last with this uid."""
        return self.state.jobs.get(self._job_by_uid.get(uid, ""))

    # --- what changes ---

    def asked(self, request: Request) -> None:
        self._arrived += 1
        name = (request.job, request.key)
        self._arrival[name] = self._arrived
        self._by_job[request.job][request.key] = request
        self._by_client[request.client][name] = None
        if request.is_fillers:
            self._fillers[name] = request
            return
        for node in request.nodes:
            self._queue[node][name] = request
        self._nodes.update(request.nodes)

    def gone(self, request: Request) -> None:
        name = (request.job, request.key)
        del self._arrival[name]
        _discard(self._by_job, request.job, request.key)
        _discard(self._by_client, request.client, name)
        if request.is_fillers:
            del self._fillers[name]
            return
        for node in set(request.nodes):
            _discard(self._queue, node, name)
        self._nodes.update(request.nodes)

    def granted(self, lease: Lease) -> None:
        """Also of a lease that is known already, with fewer nodes than before."""
        self._leave(lease.token)
        self._job_by_token[lease.token] = lease.job
        self._tokens_of[lease.job][lease.token] = None
        self._held[lease.token] = lease.nodes
        for node in lease.nodes:
            self._holders[node][lease.token] = None
        self._nodes.update(lease.nodes)

    def freed(self, token: int) -> None:
        _discard(self._tokens_of, self._job_by_token.pop(token), token)
        self._leave(token)

    def _leave(self, token: int) -> None:
        nodes = self._held.pop(token, [])
        for node in set(nodes):
            _discard(self._holders, node, token)
        self._nodes.update(nodes)

    def moved(self, job: Job) -> None:
        """It came, went into another state, or was given nodes."""
        for node in self._nodes_of.get(job.name, ()):
            _discard(self._jobs_on, node, job.name)
        self._nodes_of[job.name] = job.all_nodes
        self._forget_uid(job.name)
        self._uid_of[job.name], self._job_by_uid[job.uid] = job.uid, job.name
        for node in self._nodes_of[job.name]:
            self._jobs_on[node][job.name] = None
        self._jobs.add(job.name)
        for request in self._by_job.get(job.name, {}).values():
            self._nodes.update(request.nodes)

    def forgotten(self, job: Job) -> None:
        for node in self._nodes_of.pop(job.name):
            _discard(self._jobs_on, node, job.name)
        self._jobs.discard(job.name)
        self._forget_uid(job.name)

    def look_again(self) -> None:
        """Nodes were fenced or are no more, which holds back requests for others too, or lets them go."""
        self._nodes.update(self._queue, self._jobs_on)

    # --- what follows ---

    def grantable(self) -> list[Request]:
        """As queueing.grantable, which is left to itself where others than the first of a queue may run."""
        self._look_at_everything_if_rules_changed()
        if self._mode() != "interleaved":
            return queueing.grantable(self.state, self.config)
        heads = {}
        for node in self._nodes:
            if (head := self._head(node)) is not None:
                heads[head.job, head.key] = head
        arrived = sorted(heads.values(), key=lambda request: self._arrival[request.job, request.key])
        firsts = queueing.in_order(arrived, self.state)
        return [request for request in firsts if all(self._head(node) is request for node in request.nodes)]

    def fillers(self) -> list[Request]:
        """Their requests, in order of arrival."""
        return list(self._fillers.values())

    def is_open(self, node: str) -> bool:
        """As granting.is_open."""
        waiting = self._queue.get(node, {}).values()
        return node not in self._holders and not any(granting.keeps_out(request, self.state) for request in waiting)

    def contended(self) -> list[tuple[Job, list[str], list[list[str]]]]:
        """Jobs for which it may have changed, in order of registration, with their nodes that another job stands in the
        queue for, and which of them would let one begin."""
        owner = self._owner()
        for node in self._nodes:
            wanting = self._wanting(node, owner)
            if wanting != self._wanted_by.get(node, ()):
                self._wanted_by[node] = wanting
                self._jobs.update(self._jobs_on.get(node, ()))
            # Whoever waits here may hang on the other nodes that it names, and their holders on this.
            for request in self._queue.get(node, {}).values():
                for other in request.nodes:
                    self._jobs.update(self._job_by_token[token] for token in self._holders.get(other, ()))
            self._jobs.update(self._job_by_token[token] for token in self._holders.get(node, ()))
        jobs = [self.state.jobs[name] for name in self._jobs if name in self.state.jobs]
        self._nodes, self._jobs = set(), set()
        return [(job, self._contended(job), self._gangs(job)) for job in sorted(jobs, key=lambda job: job.order)]

    def _contended(self, job: Job) -> list[str]:
        nodes = self._nodes_of[job.name]
        return [node for node in nodes if self._wanted_by.get(node, ()) not in ((), (job.name,))]

    def _gangs(self, job: Job) -> list[list[str]]:
        held = [self._held[token] for token in self._tokens_of.get(job.name, ())]
        mine = {node: None for nodes in held if len(nodes) > 1 for node in nodes}
        firsts = {(first.job, first.key): first for node in mine if (first := self._first(node)) is not None}
        return sorted(
            [node for node in job.all_nodes if node in mine and node in it.nodes]
            for it in firsts.values()
            if it.job != job.name
            and all(self._first(node) is it and (node in mine or node not in self._holders) for node in it.nodes)
        )

    def _head(self, node: str) -> Request | None:
        """Whom a free node goes to next."""
        return None if node in self._holders else self._first(node)

    def _first(self, node: str) -> Request | None:
        """Whom the node goes to when it is free."""
        waiting = self._queue.get(node, {}).values()
        ordered = queueing.in_order(waiting, self.state) if self.state.placed.groups else waiting
        return next((each for each in ordered if not queueing.held_back(each, self.state, self.config)), None)

    def _wanting(self, node: str, owner: Job | None) -> tuple[str, ...]:
        found = ""
        for request in self._queue.get(node, {}).values():
            if request.job != found and not queueing.held_back(request, self.state, self.config, owner):
                if found:
                    return _SEVERAL
                found = request.job
        return (found,) if found else ()

    def _mode(self) -> str:
        return queueing.mode(self.state, self.config)

    def _owner(self) -> Job | None:
        return queueing.turn(self.state, self.config) if self._mode() == "sequential" else None

    def _look_at_everything_if_rules_changed(self) -> None:
        """What holds all requests back or lets them go. A turn may pass with any event, and is not followed."""
        rules = (self.state.settle_until is None, self.state.started, self.state.segment)
        if rules != self._rules or self._mode() == "sequential":
            self._rules = rules
            self.look_again()

    def _forget_uid(self, name: str) -> None:
        if self._job_by_uid.get(uid := self._uid_of.pop(name, "")) == name:
            del self._job_by_uid[uid]


def _discard(index: dict, key: object, member: object) -> None:
    """Nothing is kept for what is empty: names come from others, and there is no end to them."""
    members = index[key]
    del members[member]
    if not members:
        del index[key]
