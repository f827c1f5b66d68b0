"""`verl-mux bench rollout`, `migration` and `predictor`: what shortens a rollout. Run on the command line; all but the last start
real jobs."""
