"""The keys under `mux`: their checks in the driver before Ray starts, and what they imply, in the driver and in the trainer. The
YAML beside it is what Hydra composes. Imports data and names from other rooms, and the coordinator's client to ask it."""
