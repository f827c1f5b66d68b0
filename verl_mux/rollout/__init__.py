"""Generating a step's samples, by the process that does it: control/ in the trainer, worker/ in the agent loop workers, engine/
in the engines' servers and schedulers. lengths/ is pure. No room imports the trainer."""
