"""Weights from the trainers' host copies to the engines: sent in trainer workers, received in rollout workers, started by the
trainer's driver. Of the package it imports errors only.
"""
