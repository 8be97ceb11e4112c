"""RoundTrips: stands between a client and its database and counts how often the client waits for an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import make_url

_SYNC, _QUERY = b"S"[0], b"Q"[0]  # after each of these PostgreSQL answers "ready for query"
_QUIT = b"\x01"  # MariaDB answers nothing to it


class RoundTrips:
    """The count so far, with PostgreSQL. A number taken before is subtracted by whoever compares."""

    def __init__(self, host: str, port: int) -> None:
        self.count = 0
        self._server = (host, port)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(*self._server)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_copy(server_reader, writer))
                tasks.create_task(self._requests(reader, server_writer))
        except* (ConnectionError, asyncio.IncompleteReadError):
            pass  # one side hung up

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Every message has a byte for its kind, then its length; only the very first has no kind."""
        try:
            started = False
            while True:
                kind = await reader.readexactly(1) if started else b""
                length = await reader.readexactly(4)
                body = await reader.readexactly(int.from_bytes(length) - 4)
                writer.write(kind + length + body)
                started = started or int.from_bytes(body[:4]) >> 16 == 3  # before it, a client may ask for TLS
                self.count += kind != b"" and kind[0] in (_SYNC, _QUERY)
        finally:
            writer.close()


class MysqlRoundTrips(RoundTrips):
    """The same with MariaDB or MySQL: a command begins with the number 0, and one is sent after the other."""

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readexactly(4)
                body = await reader.readexactly(int.from_bytes(head[:3], "little"))
                writer.write(head + body)
                self.count += head[3] == 0 and body[:1] != _QUIT
        finally:
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
    finally:
        writer.close()


@asynccontextmanager
async def counting(url: str, kind: type[RoundTrips] = RoundTrips) -> AsyncIterator[tuple[RoundTrips, str]]:
    """Round trips to the server, and the URL through which they are counted."""
    parsed = make_url(url)
    trips = kind(parsed.host or "127.0.0.1", parsed.port or 5432)
    server = await asyncio.start_server(trips.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield trips, parsed.set(port=port).render_as_string(hide_password=False)
    finally:
        server.close()
