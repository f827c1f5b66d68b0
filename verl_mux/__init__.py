"""verl_mux: several verl RL jobs on the same GPUs, each taking the phases the others leave idle.

Importing this package imports neither torch nor ray.
"""

__version__ = "0.1.0"
