"""One of verl's checkpoint engines and ours in turns, in real worker processes; see __main__.py. Behind a bench alone.

Started by bench/sync/sync_bench.py.
"""
