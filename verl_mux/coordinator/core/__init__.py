"""The coordinator's decisions, in its process: a pure state machine, and what it calls.

No I/O, no clock, no thread. May be imported from here: `bus.messages`, `scheduling/`, and the names of events.
"""
