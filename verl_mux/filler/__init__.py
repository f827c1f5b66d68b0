"""`verl-mux hold`: any command on nodes that no job uses now. Runs in the process that a person or a launcher starts, on the host
of those nodes. May import the coordinator's client; nothing of what runs inside a job.
"""
