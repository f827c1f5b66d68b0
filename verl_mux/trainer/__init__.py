"""verl's trainer modes of ours and what its own modes take from us, in the trainer's process; workers.py in the training workers.
May import every room of the job; nothing imports it."""
