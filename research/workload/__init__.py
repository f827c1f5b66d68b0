"""What arrives when in a simulation: traces, shapes of jobs, lengths that vary; with the data it carries. Offline; imports
scheduling/model.py and estimate/."""
