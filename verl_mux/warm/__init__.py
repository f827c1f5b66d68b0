"""Import once, fork many: how the processes of a job on one host share what they import. Nothing runs here; see fork_server.py."""
