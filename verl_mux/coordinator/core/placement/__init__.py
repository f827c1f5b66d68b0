"""Jobs that leave their nodes to the coordinator: where they go, what is learnt of their phases, what a group will take. Pure.

May be imported from here: the core's records and settings, `bus.messages`, `scheduling/`.
"""
