"""vLLM: its record (read everywhere, imports no vLLM), our server (an actor of its own), what it sees of vLLM's requests
(vllm_calls.py), and our worker class, which vLLM loads in its worker processes."""
