"""What a job and the coordinator say to each other.

In the trainer's process (a client): `connect`, `client`, `link`. On both sides: `messages`, the words; `members`, the
processes of a job on this host. The other end of the socket is `coordinator/server.py`. May be imported from here:
`scheduling.estimate.job_needs`, which travels in a message; nothing of the coordinator's other folders.
"""
