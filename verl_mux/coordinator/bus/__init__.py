"""The control bus: what a job, an agent or a command and the coordinator send each other. Imports none of the coordinator's
modules.

`client` and `conversation` run in jobs; `link` (both ends), `messages`, `members` (processes on this host) and `curve_keys` on
both sides; `fence` in the processes that map device memory.
"""
