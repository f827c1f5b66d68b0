"""Where a node lies and where a job's processes run. place.py is pure, for both sides of the bus; ray_nodes.py binds pools to
nodes, in the trainer; here.py tells where a process runs, in every process of a job."""
