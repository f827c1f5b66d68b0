"""A disk that has no room for longer files, without a disk."""

import contextlib
import resource


@contextlib.contextmanager
def no_room_beyond(size):
    """For any file of this process, so only for the length of a block: pytest writes too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
