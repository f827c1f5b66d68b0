"""What if: recorded rollouts run again under other keys, through the product's own state machines. Offline; reads the report's
tables, decides nothing for a running job.

    log -> recording (what was asked and how long it took) -> engines (how fast they were) -> rerun under keys -> advice

Runs on the command line.
"""
