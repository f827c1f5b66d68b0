"""From the files of a run to tables of requests, turns and spans; what cannot be read is counted by name. Runs in the report's
processes; imports plain/ and eventlog/ only.
"""
