"""Waiting in an event loop for what blocks a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def aside(function: Callable[..., T], *args: object) -> asyncio.Future[T]:
    """`function(*args)` in a thread of its own. The loop's own threads are few, and the ends of a sync wait for each other."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable, value: object) -> None:
        if not future.done():
            set_it(value)

    def tell(set_it: Callable, value: object) -> None:
        with contextlib.suppress(RuntimeError):  # nobody waits any more: the loop is closed
            loop.call_soon_threadsafe(settle, set_it, value)

    def run() -> None:
        try:
            tell(future.set_result, function(*args))
        except BaseException as error:
            tell(future.set_exception, error)

    threading.Thread(target=run, daemon=True).start()
    return future
