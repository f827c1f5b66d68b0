"""Nodes that come and go while jobs run, and whether more of them would pay or some could go. Pure.

May be imported from here: the core's records and settings, `hosts/`, `placement/`.
"""
