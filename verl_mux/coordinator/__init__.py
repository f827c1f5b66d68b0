"""The running mux: which job may use which nodes now. A process of its own; jobs, agents and commands import `bus/` alone.

`core/` decides, `bus/` is what jobs and the coordinator send each other; the modules here read its file, serve the socket, keep
the journal, and show. They import `core/` and `bus/` (never the other way round), `placement/` and `profiling.eventlog`.
"""
