"""Placement policies compared on traces, and the figures of RollMux's paper. Run from a checkout as `verl-mux simulate`."""

# name -> (module, function, one line of help); the module is imported when the command runs or asks for its own --help.
COMMANDS = {"simulate": ("research.command", "simulate", "Compare placement policies on a trace of jobs.")}
