"""Placement on traces of jobs, offline: `verl-mux simulate` and `verl-mux plan`. Imports scheduling/, whose very decisions it
replays."""
