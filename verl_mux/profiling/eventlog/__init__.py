"""Writes the event log, in every process that logs: the table of events, lines, files. May import msgspec; nothing of ours that
reads, and no library for readers.
"""
