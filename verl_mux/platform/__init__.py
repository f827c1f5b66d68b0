"""What a job knows of devices: which platform it runs on, what processes keep there, and the ledger where host memory is the
device. Runs in every process of a job and in agents; the CPU platform itself is the package verl_mux_cpu."""
