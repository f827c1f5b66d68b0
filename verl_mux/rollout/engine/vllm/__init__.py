"""vLLM: its record (read everywhere, imports no vLLM), our server (an actor of its own), what it sees of vLLM's requests
(vllm_calls.py), and our worker class, which vLLM loads in its worker processes."""

# Functions of vLLM that answer with the context of multiprocessing in which its processes start.
CONTEXTS = tuple(
    f"vllm.v1.{module}.get_mp_context" for module in ("engine.utils", "engine.coordinator", "executor.multiproc_executor")
)
