"""Tells whoever starts and ends nodes: runs a command, or posts to a URL. In a thread of its own, one after the other; the loop
goes on granting leases meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec

from verl_mux.coordinator.core.inputs_and_instructions import Call, HookFailed
from verl_mux.coordinator.core.settings import Hook

COMMAND_S, POST_S = 60.0, 10.0
_SAID = 500


class Hooks:
    """`call` -> `take(HookFailed)` in the loop if that failed -> `close`, which ends what still runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[HookFailed], None], environment: Mapping[str, str],
                 command_s: float = COMMAND_S) -> None:  # fmt: skip
        self._loop, self._take, self._command_s = loop, take, command_s
        self._environment = environment
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verl-mux-hooks")
        self._running: subprocess.Popen | None = None
        self._closed = False

    def call(self, what: Call, hook: Hook) -> None:
        """A command gets JSON on its standard input and what is brief as VERL_MUX_* in its environment; a URL gets the JSON."""
        telling = self._loop.run_in_executor(self._thread, self._tell, what, hook)
        telling.add_done_callback(lambda done: self._told(what, done))

    def close(self) -> None:
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._running is not None:
            _kill(self._running)

    def _told(self, what: Call, telling: asyncio.Future[str | None]) -> None:
        if telling.cancelled() or self._closed:
            return
        error = telling.exception()
        reason = telling.result() if error is None else f"{type(error).__name__}: {error}"
        if reason is not None:
            self._take(HookFailed(pool=what.pool, more=what.about.get("more", 0), reason=reason))

    def _tell(self, what: Call, hook: Hook) -> str | None:
        """Why it failed; None: it did not."""
        body = msgspec.json.encode({"hook": what.hook, **what.about})
        if isinstance(hook, str) and hook.startswith(("http://", "https://")):
            return _post(hook, body)
        names = {f"VERL_MUX_{key.upper()}": value for key, value in {"hook": what.hook, **what.brief}.items()}
        return self._run(["/bin/sh", "-c", hook] if isinstance(hook, str) else hook, body, names)

    def _run(self, command: list[str], body: bytes, names: dict[str, str]) -> str | None:
        try:
            # In a session of its own, so that all that it started can be ended with it.
            running = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment, **names}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return f"{command[0]} cannot be started: {error.strerror}"
        self._running = running
        if self._closed:  # meanwhile: `close` did not see it yet
            _kill(running)
        try:
            said, _ = running.communicate(body, timeout=self._command_s)
        except subprocess.TimeoutExpired:
            _kill(running)
            running.communicate()
            return f"{command[0]} did not end within {self._command_s:g} s"
        finally:
            self._running = None
        return f"exit code {running.returncode}: {_words(said)}" if running.returncode else None


def _post(url: str, body: bytes) -> str | None:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=POST_S):
            return None
    except (OSError, ValueError, urllib.error.URLError) as error:
        return f"{url}: {error}"


def _words(said: bytes) -> str:
    """The end of what a command said, on one line."""
    return " ".join(said[-_SAID:].decode(errors="replace").split()) or "it said nothing"


def _kill(running: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
