"""`python -m verl_mux`: the command line, where the script `verl-mux` is not on the path."""

from verl_mux.cli import main

main()
