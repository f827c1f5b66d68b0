"""A Ray cluster of its own for each job, on the hosts of its nodes.

`__main__.py` is the job's process on the launcher's machine, a keeper (`keeper.py`) runs on each host for as long as the job
does. They speak over the keeper's stdin and stdout, through whatever starts a command there (ssh, srun, kubectl, ...:
`reach.py`), so no port has to be open for it. What both are told is data (`messages.py`); who starts what where is decided in
`layout.py`, pure.
"""
