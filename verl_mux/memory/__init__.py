"""What sleeps and how much of it: savers and tags, in trainer workers and engine processes; sleep states, in the engine's server.
Imports nothing of ours but the
ledger of devices that are host memory."""
