"""Behind `verl-mux bench rollout`, `tail`, `migration` and `predictor`: what shortens a rollout."""
