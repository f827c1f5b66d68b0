"""Generates the trainer's samples. Runs in verl's agent loop workers; the trainer calls the manager in agent_loop.py."""
