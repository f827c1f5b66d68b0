"""What goes where: decisions only, no I/O and no clock. Runs in whoever asks: the coordinator, `verl-mux plan` and `simulate`.
Imports nothing of ours but errors. model.py is the bottom; time/, search/, repack/, placer/ stand on each other in this order,
estimate/ beside them."""
