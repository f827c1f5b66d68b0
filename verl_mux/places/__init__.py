"""Where nodes lie and processes run. place.py is pure, for both sides of the bus; ray_nodes.py asks Ray, in a job's processes."""
