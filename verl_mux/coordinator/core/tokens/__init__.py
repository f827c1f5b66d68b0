"""What a lease's token proves: how they are numbered, what became of each, what clients claim after a loss of memory. Pure.

Imports the records and, to know whom a claim meets, the queues' rules.
"""
