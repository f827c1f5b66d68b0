"""The answers to "a job arrives, leaves, is other than estimated", and why not elsewhere. Pure; the top of scheduling/, imports
all of it but estimate/."""
