"""Import once, fork many: how the processes of a job on one host share what they import. See fork_server.py."""
