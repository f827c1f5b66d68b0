"""`verl-mux top`: what a run does now. job_states.py reads new lines of the newest steps, screen.py shows them. Changes
nothing."""
