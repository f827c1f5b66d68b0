"""Can the hosts be reached on which the job works? One that is cut off would keep the job, and the nodes that it holds elsewhere.

A collective with a rank on such a host never ends, and Ray may tell nobody for five minutes that a call to it was lost: it looks
after a connection on which nothing comes no sooner.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from verl_mux.errors import Failure
from verl_mux.places.place import resource_of

if TYPE_CHECKING:
    from verl_mux.places.ray_nodes import RayNode

_EVERY_S = 1.0
_ANSWER_S = 2.0
# A host that refuses, or too few files of our own, is another matter.
_NO_WAY = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)

Address = tuple[str, int]


class HostLost(Failure):
    """A host that the job works on cannot be reached."""


def hosts_of(nodes: Iterable[str], cluster: Iterable[RayNode], here: str) -> dict[str, Address]:
    """Where Ray listens on the hosts of these mux nodes, by what people call them. Without `here`, this host's own address."""
    nodes, found = list(dict.fromkeys(nodes)), {}
    for it in cluster:
        of = [node for node in nodes if it.resources.get(resource_of(node))]
        if of and it.address != here:
            found[f"the host of {' and '.join(of)} ({it.address})"] = (it.address, it.port)
    return found


class HostWatch:
    """Tries to connect to each of `hosts` once a second, in a thread of its own until `close`.

    `end` is called in that thread when one that answered before has not for `limit_s` seconds of this process's running time.
    """

    def __init__(
        self, hosts: Mapping[str, Address], limit_s: float, end: Callable[[HostLost], None], every_s: float = _EVERY_S
    ) -> None:
        self._hosts, self._limit_s, self._end, self._every_s = hosts, limit_s, end, every_s
        self._silent_s: dict[str, float] = {}  # of those that have answered once
        self._over = threading.Event()
        if hosts:
            threading.Thread(target=self._watch, name="verl-mux-hosts", daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        since = time.monotonic()
        while not self._over.wait(self._every_s):
            silent = [name for name, address in self._hosts.items() if not _answers(address)]
            now = time.monotonic()
            # More is a pause of this process itself.
            passed, since = min(now - since, self._every_s + len(self._hosts) * _ANSWER_S), now
            for name in self._hosts:
                if name not in silent:
                    self._silent_s[name] = 0.0
                elif name in self._silent_s:
                    self._silent_s[name] += passed
            lost = [name for name, seconds in self._silent_s.items() if seconds > self._limit_s]
            if lost and not self._over.is_set():
                return self._end(HostLost(f"{' and '.join(lost)} could not be reached for {self._limit_s:g} s"))


def _answers(address: Address) -> bool:
    try:
        socket.create_connection(address, _ANSWER_S).close()
    except OSError as error:
        return not isinstance(error, TimeoutError) and error.errno not in _NO_WAY
    return True
