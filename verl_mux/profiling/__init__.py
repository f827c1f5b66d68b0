"""The event log of jobs and coordinator: eventlog/ writes it, plain/ reads it line by line, report/ in bulk, live/ as it
grows."""
