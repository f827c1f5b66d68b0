"""The running mux: who may use which nodes now.

A way in: `messages` is what travels, `state` decides (with `queueing` for the order), `journal` remembers, `server` is
the service around them, `client` is what a job uses, `members` and `reaping` are about jobs that died.
"""
