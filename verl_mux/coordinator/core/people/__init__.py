"""On whose behalf jobs run: shares of the nodes, priorities, deadlines, budgets. Pure.

May be imported from here: the core's records and settings, `bus.messages`, `scheduling/`.
"""
