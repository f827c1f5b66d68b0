"""What a step's rollout does next: over-sampling, segments, tail rounds, launching order, moves between replicas, the trigger.

Decides only, in the trainer's driver; verl_mux/trainer carries it out, verl_mux/what_if asks it about recorded runs. All pure.
"""
