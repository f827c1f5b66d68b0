"""The coordinator's decisions, in its process: a pure state machine (`state.Machine`) with features that it calls at named
moments.

No I/O, no clock, no thread. May import `bus.messages`, `placement/` and the names of events. A new feature is one class and one
line here.
"""

from verl_mux.coordinator.core.hosts import Hosts
from verl_mux.coordinator.core.leases import Feature
from verl_mux.coordinator.core.placing import Placement

FEATURES: tuple[type[Feature], ...] = (Hosts, Placement)
