"""Rollouts replayed in virtual time: the product's own state machines over recorded lengths. Runs offline; may import the rooms
that decide."""
