"""What a job's connection to its coordinator goes through, in a process of its own: stopped, it cuts the job off; going on, it
brings everything that was under way, late.

python -m bench.chaos.proxy PORT TARGET_PORT Started by schedule.py; touches its two sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _serve(port: int, target: int) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", target)
        except OSError:
            return writer.close()
        await asyncio.gather(_forward(reader, there_writer), _forward(there_reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
