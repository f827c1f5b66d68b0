"""The agent, a process on each host of the jobs: `agent.py` looks, reports and ends processes, `devices.py` reads device
memory."""
