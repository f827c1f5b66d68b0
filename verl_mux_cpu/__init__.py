"""verl_mux on a machine without a GPU: the CPU as verl's device, a memory saver for it, and SGLang's way there.

A distribution of its own, for the demo and the tests. Runs in every process of such a job; verl, SGLang and verl_mux come in
through the entry points in pyproject.toml, and verl_mux imports none of it.
"""
