"""Behind `verl-mux bench rollout`, `tail`, `migration` and `predictor`: what shortens a rollout.

Runs on the command line and, for migration and modes, starts real jobs.
"""
