"""`verl-mux top`: what a run does now, from the lines that its event logs grow by. Reads files; asks and changes nothing.

follow (new lines of the newest steps) -> state (what they add up to; pure) -> view (tables), metrics (gauges); terminal: keys
"""
