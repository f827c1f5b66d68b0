"""Decides which jobs share which nodes. Pure: no I/O and no clock. Runs in the process that asks: the coordinator's placement
thread, `verl-mux plan`, and the simulation in research/. Imports nothing of ours but errors and composed_config."""
