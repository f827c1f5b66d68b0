"""Who sends what to whom in a weight sync, and what that costs: in the trainer, and for `verl-mux plan --sync`. Pure, but for
`command.py`, which reads a file and prints.
"""
