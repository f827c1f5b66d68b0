"""Where a job can go, on which nodes, at what price: the groups there are, ways to join one, and the cheapest nodes for a set of
jobs. Pure; imports scheduling/model.py and time/."""
