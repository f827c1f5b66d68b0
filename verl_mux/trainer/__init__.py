"""Our trainer modes of verl, and what verl's own modes take from us.
Runs in the trainer's driver; workers.py in the training workers.

verl imports modes.py (see plugin.py). May import every room of the job; no room imports this package.
"""
