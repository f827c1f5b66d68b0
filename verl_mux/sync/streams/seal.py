"""Which weights are ours: what travels carries a code that only a process of the job can make (keyed BLAKE2b).

The trainer draws the key when it builds the routes and hands it out with them, over Ray, so it is in no configuration and no
log. Each connection has a seal of its own, made from the key and from a number that its receiver has drawn for it: what was
recorded on one connection is worth nothing on another. The digests of the pieces are in their headers, so what is checked
against them is bound to it. That keeps out who reaches the sockets. It does not keep out who changes packets on their way: the
digests are quick ones, and nothing is encrypted. CURVE would, for four times the processor time of a plain transfer.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

CODE_BYTES = 16


def new_key() -> bytes:
    return secrets.token_bytes(32)


class Seal:
    def __init__(self, key: bytes) -> None:
        self._key = key

    def of_connection(self, *known_to_both: bytes) -> Seal:
        """The seal of one connection, for what both its ends know of it alone."""
        return Seal(self._digest(known_to_both, 32))

    def code(self, *parts: bytes) -> bytes:
        return self._digest(parts, CODE_BYTES)

    def is_ours(self, code: bytes, *parts: bytes) -> bool:
        return hmac.compare_digest(code, self.code(*parts))

    def _digest(self, parts: tuple[bytes, ...], nbytes: int) -> bytes:
        hasher = hashlib.blake2b(digest_size=nbytes, key=self._key)
        for part in parts:
            hasher.update(len(part).to_bytes(8, "big"))
            hasher.update(part)
        return hasher.digest()
