"""verl_mux: several verl RL jobs on the same GPUs, each taking the phases the others leave idle.

Importing this package imports neither torch nor ray.
"""

__version__ = "0.1.0"
__all__ = ["__version__", "phase"]


def __getattr__(name: str):
    # `verl_mux.phase` is the one public function most code needs; ZeroMQ is loaded only when it is asked for.
    if name == "phase":
        from verl_mux.coordinator.bus.client import phase

        return phase
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
