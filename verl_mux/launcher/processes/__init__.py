"""What `verl-mux run` starts and ends: the coordinator, jobs, agents, fillers, each a marked process tree. In the process that
a person started; `keep_exit_code.py` runs in a job's driver. May import what the launcher may.
"""
