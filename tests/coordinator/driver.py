"""A state machine driven by hand: events by name, a clock that ticks once per event, everything kept."""

import msgspec

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.core import placing
from verl_mux.coordinator.core.placed_jobs import Standing
from verl_mux.coordinator.core.placing import Answerer
from verl_mux.coordinator.core.records import Input, Log, PoolsChanged, Send

POOLS = {
    "rollout": {"nodes": [{"name": "r0"}, {"name": "r1"}]},
    "train": {"nodes": [{"name": "t0"}]},
}
SIDES = {"rollout": ["r0", "r1"], "train": ["t0"]}


def config(**keys):
    return make_config({"pools": POOLS, "lease_timeout": 5, **keys})


def changed_pools(pools, drain=(), undrain=(), add=None, remove=()):
    """The pools as a file has them in which nodes drain, drain no more, were added (name -> pool, each like the pool's first
    node) or were removed."""

    def changed(node):
        is_draining = (node.drain or node.name in drain) and node.name not in undrain
        return msgspec.structs.replace(node, drain=is_draining)

    found = {}
    for name, pool in pools.items():
        nodes = [changed(node) for node in pool.nodes if node.name not in remove]
        first = msgspec.structs.replace(pool.nodes[0], drain=False)
        nodes += [msgspec.structs.replace(first, name=new) for new, where in (add or {}).items() if where == name]
        found[name] = msgspec.structs.replace(pool, nodes=nodes)
    return found


class Driver:
    """Feeds a machine by name, with a clock that ticks once per event; keeps all events and instructions."""

    def __init__(self, machine):
        self.machine, self.now = machine, 0.0
        self.planner = Answerer()
        self.events, self.sent, self.logged = [], [], []

    def do(self, what, after=1.0):
        self.now += after
        out = self._handle(Input(self.now, what))
        while (asked := placing.asked(self.machine.state, self.machine.config, self.now)) is not None:
            out += self._handle(Input(self.now, self.planner.answer(asked, Standing(self.machine.state, self.now))))
        self.sent += [step for step in out if isinstance(step, Send)]
        self.logged += [step for step in out if isinstance(step, Log)]
        return [step.message for step in out if isinstance(step, Send)]

    def _handle(self, event):
        out = self.machine.handle(event)
        self.events.append(event)
        return out

    def reload(self, **changes):
        """The file is read again, with these changes of its nodes (see changed_pools)."""
        return self.do(PoolsChanged(pools=changed_pools(self.machine.config.pools, **changes)))

    def wait(self, seconds, every=0.5):
        """Time passes; what is due is handled. Returns what it was."""
        seen = []
        for _ in range(round(seconds / every)):
            self.now += every
            for event in self.machine.due(self.now):
                seen.append(event.what)
                self.do(event.what, after=0.0)
        return seen

    def who(self, job, uid=None):
        return {"job": job, "uid": uid or f"{job}:1", "client": f"{job}-client"}

    def register(self, job, nodes=SIDES, uid=None, **keys):
        where = {"host": "here", "pid": 7, "started": 1}
        return self.do(m.Register(**self.who(job, uid), nodes=nodes, **where, **keys))

    def ask(self, job, phase, step, nodes, key=None):
        key = key or f"{job}.{phase}.{step}"
        return self.do(m.LeaseRequest(**self.who(job), key=key, phase=phase, step=step, nodes=nodes))

    def release(self, job, token=None):
        token = token or next(lease.token for lease in self.machine.state.leases_of(job))
        return self.do(m.LeaseRelease(**self.who(job), token=token))

    def holders(self, node):
        return [lease.job for lease in self.machine.state.leases.values() if node in lease.nodes]

    def events_logged(self):
        return [line.event for line in self.logged]
