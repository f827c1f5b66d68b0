"""Stands for the Python interpreter that Ray starts a worker with: asks the job's fork server for a fork that does the same.

    python -I -S fork_client.py SOCKET [what the interpreter would get]

It stays until the fork has ended and ends as the fork did. Where the fork server does not answer, it becomes the interpreter.
Runs on the host of the job's driver; started by Ray's raylet; imports the standard library only, because it has to start in
milliseconds.
"""

import json
import os
import signal
import socket
import struct
import sys

NUMBER = struct.Struct("!i")


def main() -> None:
    name, *words = sys.argv[1:]
    server = socket.socket(socket.AF_UNIX)
    try:
        if f"/{space()}/" not in name:
            raise OSError("it is in another container")  # whose sockets this one sees, but not its files
        server.connect(f"\0{name}")
        ask(server, words)
        pid = read(server)
    except OSError as error:
        print(f"verl_mux: no fork server ({error}): this worker imports for itself", file=sys.stderr, flush=True)
        os.execv(sys.executable, [sys.executable, *words])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    try:
        code = read(server)
    except OSError:
        code = 1  # the fork server is gone, and the job with it
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def space() -> int:
    """Of process ids: another one in each container."""
    return os.stat("/proc/self/ns/pid").st_ino


def ask(server: socket.socket, words: list[str]) -> None:
    cores = sorted(os.sched_getaffinity(0))
    asked = {"words": words, "environment": dict(os.environ), "folder": os.getcwd(), "cores": cores, "niceness": os.nice(0)}
    text = json.dumps(asked).encode()
    text = NUMBER.pack(len(text)) + text
    server.sendall(text[socket.send_fds(server, [text], [0, 1, 2]) :])


def read(server: socket.socket) -> int:
    """Raises OSError where the fork server is gone."""
    answer = server.recv(NUMBER.size, socket.MSG_WAITALL)
    if len(answer) < NUMBER.size:
        raise OSError("it closed the connection")
    return int(NUMBER.unpack(answer)[0])


if __name__ == "__main__":
    main()
