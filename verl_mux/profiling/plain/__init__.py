"""Reads event logs where the report's dataframe engine must not be needed: in the trainer (a step's metrics), the launcher and
the benches. May import eventlog/ and msgspec, no numpy and no polars; report/ builds on it.
"""
