"""Weights from the trainer's host copies to the engines: sent in trainer workers, received in rollout workers, steered from the
trainer. Imports nothing of ours; route.py is pure."""
