"""Sink: an HTTP server on this machine that answers every request with 204. Says its port and serves until it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import uvloop

ANSWER = b"HTTP/1.1 204 No Content\r\n\r\n"
END_OF_HEADERS = b"\r\n\r\n"
LENGTH = b"\r\ncontent-length:"


class Sink(asyncio.Protocol):
    """One connection. It does no more than it must, so that whoever posts is what is measured."""

    def __init__(self) -> None:
        self._unread = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._unread += data
        while size := _size(self._unread):
            self._unread = self._unread[size:]
            self._transport.write(ANSWER)


def _size(unread: bytes) -> int:
    """Bytes of the first request, if it is there as a whole."""
    end = unread.find(END_OF_HEADERS)
    if end < 0:
        return 0
    _, found, rest = unread[: end + 2].lower().partition(LENGTH)
    size = end + len(END_OF_HEADERS) + (int(rest.partition(b"\r\n")[0]) if found else 0)
    return size if size <= len(unread) else 0


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Sink, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
