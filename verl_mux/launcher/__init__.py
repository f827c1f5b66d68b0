"""`verl-mux run`, `verl-mux plan` and `verl-mux doctor`, in the process that a person starts. `run` keeps the coordinator and
every verl job as a process tree of its own, which outlives it, on this machine; figures come from the event log. May import the
coordinator, placement, the certificate and the event log; nothing of what runs inside a job.
"""
