"""What was measured, with no opinion on it: completion, shares, leases, pace; `Analysis` holds it all, computed once. Pure, over
the tables of input/.
"""
