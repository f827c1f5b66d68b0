"""The agent: looks at one host for a coordinator. A process of its own on each host of the jobs, in each PID namespace that
has them. It tells which processes carry the mark of which job and what device memory they hold, ends those of jobs that are
over, and decides nothing.

`command` starts it, `loop` talks, `processes` and `devices` look, `mapped` tells its log what changed.
"""
