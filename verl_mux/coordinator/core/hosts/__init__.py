"""Hosts: who looks at which, what a dying job may still hold there, and which nodes nobody gets meanwhile. Pure.

`moves`: what inputs do to the records; `fences`: the nodes that nobody gets; `reaping`: what looks say of a dying job;
`sights`: what agents said last; `pools`: which changes of the configuration are allowed while jobs run.
"""
