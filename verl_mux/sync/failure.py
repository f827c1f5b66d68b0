"""What goes wrong in a sync."""

from __future__ import annotations


class SyncError(RuntimeError):
    """The weights that arrived are not the trainer's of this step, or did not arrive. Names whom or what it is about."""


class Lost(SyncError):
    """A connection ended, or nothing came over it in time: what its other end reports says more."""
