"""What all inference engines have in common: the record of each, the replicas (trainer) and the launch gate (rollout worker and
engine). Each engine is a folder in here, which imports from here, and which nothing but plugin.py's table names."""
