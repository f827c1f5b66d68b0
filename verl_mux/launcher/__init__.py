"""`verl-mux run` and `verl-mux doctor`, in the process that a person starts: the coordinator and every verl job as a process tree
of its own, which outlives it; the live view, and the summary from the event log. `processes/` starts and ends them.
May import the coordinator, the event log and the platform; nothing of what runs inside a job.
"""
