"""A fork server's driver that says the name of the server's socket, and ends when its standard input ends."""

import os
import sys

from verl_mux.warm.engine_processes import VARIABLE

MARK = "FORK SERVER "

if __name__ == "__main__":
    print(MARK + os.environ[VARIABLE], flush=True)
    sys.stdin.read()
