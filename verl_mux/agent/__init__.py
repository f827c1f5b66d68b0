"""The agent, a process on each host of the jobs."""
