"""What sleeps and how much of it: savers and tags, in trainer workers and engine processes; sleep states, in the engine's server.
Imports of ours only names and
what platform/ knows of devices."""
