"""What arrives when in a simulation: traces, shapes of jobs, lengths that vary; with the data it carries. Offline; imports
placement/model.py and placement/estimator.py."""
