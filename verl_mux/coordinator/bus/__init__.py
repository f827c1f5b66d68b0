"""The control bus: what a job, an agent or a command and the coordinator send each other.

On a client's side: `connect`, `client`, `conversation`, `link`. At the coordinator: `router`. On both: `messages`, `limits`,
`members` (processes on this host), `curve_keys`. Imports nothing of the coordinator's other modules.
"""
