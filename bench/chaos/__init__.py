"""`verl-mux bench chaos`: a real coordinator, real jobs of little weight and real sockets under faults that a seed draws.

`faults.py` draws, `schedule.py` carries out, `judge.py` says what was violated. Processes of their own: `coordinator.py`,
`driver.py` (a job and its devices), `proxy.py` (what a job's connection goes through). `kills.py` kills the
coordinator alone, at each point of the protocol. Runs in a process of its own for each part; started by chaos_bench.py.
"""
