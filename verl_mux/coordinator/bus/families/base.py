"""What all messages are made of: the head of each, and the process of a job as both sides name it."""

from __future__ import annotations

import msgspec

from verl_mux.coordinator.bus import limits

VERSION = 3


class Unreadable(ValueError):
    """No message of ours, or one beyond the limits. `about`: what a Refused should name, as far as that could be read."""

    about = ""


class WrongVersion(Unreadable):
    """The other side speaks another protocol version, or no protocol of ours."""

    about = "register"  # nothing else that it says will be understood either


class Message(msgspec.Struct, kw_only=True, frozen=True, tag_field="type"):
    version: int = VERSION


class FromJob(Message, kw_only=True, frozen=True):
    job: limits.Name
    uid: limits.Name
    client: limits.Name


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A process of a job, told from another with a reused pid by when it started: in clock ticks after the boot `boot`.

    Neither moves when the wall clock is set. `space`: the PID namespace in which it has that pid; empty: unknown.
    """

    host: limits.ShownName
    pid: limits.Count
    started: limits.Ticks
    boot: limits.Name
    space: limits.Name = ""
