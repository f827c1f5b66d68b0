"""`verl-mux report`, a process of its own: input/ reads, measures/ holds what was measured, findings/ what is wrong, output/
shows it. Each may import those before it, plain/ and eventlog/; polars is imported here alone.
"""
