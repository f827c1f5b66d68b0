"""The protocol explored: the coordinator's real state machine and the clients' real conversation in a made world, by random
schedules of faults. See `schedules.py`. Runs in one process; called by chaos_bench.py and tests; pure."""
