"""The coordinator's decisions, in its process: a pure state machine (`state.Machine`).

No I/O, no clock, no thread. May import `bus.messages`, `placement/` and the names of events.
"""
