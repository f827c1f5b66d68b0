"""`verl-mux bench sync`: the product's own ends of a sync in processes on shaped links.

Runs on the command line; the ends are processes of their own.
"""
