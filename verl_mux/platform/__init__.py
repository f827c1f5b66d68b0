"""The CPU as a platform of verl's, in every process of a job that runs without GPU. Imports nothing of ours; plugin.py names what
verl loads of it."""
