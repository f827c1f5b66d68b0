"""Which jobs' drivers have died on this host, without looking at each: the kernel says so through a descriptor for each."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Collection

from verl_mux.coordinator.bus import members
from verl_mux.coordinator.bus.messages import Member


class Drivers:
    """`dead` as often as wanted -> `close()`. Where there is no descriptor to be had, the process is looked at each time."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._watched: dict[Member, int] = {}
        self._by_descriptor: dict[int, Member] = {}

    def dead(self, drivers: Collection[Member]) -> list[Member]:
        """Of these, which are on this host, those that live no more; the others of the last call are watched no longer."""
        wanted = set(drivers)
        for member in self._watched.keys() - wanted:
            self._forget(member)
        unwatched = [member for member in wanted - self._watched.keys() if not self._watch(member)]
        ended = [self._by_descriptor[descriptor] for descriptor, _ in self._poll.poll(0, max(1, len(self._watched)))]
        return [member for member in (*unwatched, *ended) if not members.is_alive(member)]

    def close(self) -> None:
        for member in list(self._watched):
            self._forget(member)
        self._poll.close()

    def _watch(self, member: Member) -> bool:
        """False: it is dead, or cannot be watched."""
        try:
            descriptor = os.pidfd_open(member.pid)
        except OSError:
            return False
        if not members.is_alive(member):  # asked only now, so that the descriptor is not another's who took its pid
            os.close(descriptor)
            return False
        self._poll.register(descriptor, select.EPOLLIN)
        self._watched[member], self._by_descriptor[descriptor] = descriptor, member
        return True

    def _forget(self, member: Member) -> None:
        descriptor = self._watched.pop(member)
        del self._by_descriptor[descriptor]
        with contextlib.suppress(OSError):
            self._poll.unregister(descriptor)
        os.close(descriptor)
