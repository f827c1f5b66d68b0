"""Weights from the trainer's host copies to the engines: sent in trainer workers, received in rollout workers, steered from the
trainer. `planning/` decides who sends what to whom, `streams/` carries it. Of ours it imports errors and the reading of YAML.
"""
