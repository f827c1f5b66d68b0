"""How the processes of a job start: as forks of one that has imported what they need, on one host (see fork_server.py); a driver
that Ray's job server starts (submitted.py)."""
