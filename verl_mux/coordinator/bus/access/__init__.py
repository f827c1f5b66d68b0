"""Who may speak on the control bus: keys, the lock on the coordinator's socket, and why a connection does not come about. In both
sides' processes; may import ZeroMQ, nothing of what is said on the bus.
"""
