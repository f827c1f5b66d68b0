"""The running mux: who may use which nodes now. A process of its own.

`core/` decides, `bus/` is what jobs speak with it; what lies here reads its file, serves sockets, remembers on disk, and
shows. May be imported from here: `core/` and `bus/` (never the other way round), `scheduling/`, `profiling.eventlog`.
"""
