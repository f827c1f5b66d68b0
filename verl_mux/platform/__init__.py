"""What a job knows of devices: which platform it runs on, and what processes keep there. Runs in every process of a job and in
agents; the CPU platform itself, with the ledger of its devices, is the package verl_mux_cpu."""
