"""The two errors that a command reports in one line, without a traceback. Raised in every process."""


class UserError(ValueError):
    """Bad input: says what was given and what is allowed. A command exits with 2."""


class Failure(RuntimeError):
    """Valid input, but the work could not be done. A command exits with 1."""
