"""The messages of the control bus by who speaks; `messages.py` beside it is the door to all of them. Data alone."""
