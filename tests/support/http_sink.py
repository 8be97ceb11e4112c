"""HttpSink: a real HTTP server on loopback that misbehaves on command.

async with HttpSink() as sink:
    sink.behave(status(503, {"retry-after": "7"}), times=2)   # the next two requests; then 200 again
    sink.behave(hang())                                       # from now on
    sink.behave(by_path({"/slow": drip(0.1)}))                # whatever the request asks for
    await sink.until(5)                                       # five requests have come as a whole
    await sink.stop(); await sink.start()                     # away, and back on the same port
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self

PATIENCE = 60.0  # seconds that a test waits for requests


@dataclass(frozen=True)
class Request:
    """What came, as a whole."""

    method: str
    path: str
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Connection:
    """One client's connection, for a behaviour to write to."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    stopped: asyncio.Event

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def pause(self, seconds: float | None) -> None:
        """Wait, but not for longer than the server is there; None: until it is stopped or the client has left."""
        leaving = [asyncio.ensure_future(self.stopped.wait()), asyncio.ensure_future(self.reader.read(1))]
        try:
            await asyncio.wait(leaving, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in leaving:
                each.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)

    def reset(self) -> None:
        """Close it so that the other side gets a reset."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Behaviour = Callable[[Request, Connection], Awaitable[bool]]  # whether the connection stays usable


def status(code: int, headers: Mapping[str, str] | None = None, body: bytes = b"") -> Behaviour:
    """An ordinary answer."""

    async def behave(request: Request, connection: Connection) -> bool:
        await connection.send(answer(code, headers, body))
        return True

    return behave


def redirect(to: str, code: int = 302) -> Behaviour:
    return status(code, {"location": to})


def hang(seconds: float | None = None) -> Behaviour:
    """No answer: for so long, then 200; or for as long as the client waits."""

    async def behave(request: Request, connection: Connection) -> bool:
        await connection.pause(seconds)
        if seconds is None:
            return False
        await connection.send(answer(200))
        return True

    return behave


def reset() -> Behaviour:
    """The connection is reset once the request is here."""

    async def behave(request: Request, connection: Connection) -> bool:
        connection.reset()
        return False

    return behave


def close() -> Behaviour:
    """The connection is closed without a word."""

    async def behave(request: Request, connection: Connection) -> bool:
        return False

    return behave


def last_words(code: int = 200) -> Behaviour:
    """An ordinary answer, after which the connection is closed although the client could use it again."""

    async def behave(request: Request, connection: Connection) -> bool:
        await connection.send(answer(code))
        return False

    return behave


async def _byte_by_byte(connection: Connection, said: bytes, pause: float) -> bool:
    """Whether somebody waited for all of it."""
    for byte in said:
        await connection.send(bytes([byte]))
        await connection.pause(pause)
        if connection.stopped.is_set() or connection.reader.at_eof():
            return False
    return True


def drip(pause: float, *, body: bytes = b"x" * 1000, code: int = 200) -> Behaviour:
    """An answer byte by byte: headers first, if anybody waits so long."""

    async def behave(request: Request, connection: Connection) -> bool:
        return await _byte_by_byte(connection, answer(code, None, body), pause)

    return behave


def drip_body(pause: float, *, body: bytes = b"x" * 1000, code: int = 200) -> Behaviour:
    """Headers at once, the body byte by byte."""

    async def behave(request: Request, connection: Connection) -> bool:
        await connection.send(answer(code, {"content-length": str(len(body))}))
        return await _byte_by_byte(connection, body, pause)

    return behave


def wrong_length(said: int, body: bytes = b"short", code: int = 200) -> Behaviour:
    """A body that is shorter or longer than its header says; then the connection is closed."""

    async def behave(request: Request, connection: Connection) -> bool:
        await connection.send(answer(code, {"content-length": str(said)}, body))
        return False

    return behave


def endless(code: int = 200, chunk: bytes = b"x" * 65536) -> Behaviour:
    """A body that does not end."""

    async def behave(request: Request, connection: Connection) -> bool:
        await connection.send(answer(code, {"transfer-encoding": "chunked"}))
        piece = f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n"
        while not connection.stopped.is_set():
            await connection.send(piece)
        return False

    return behave


def garbage(data: bytes = b"\x00\x01 this is no HTTP\r\n\r\n") -> Behaviour:
    async def behave(request: Request, connection: Connection) -> bool:
        await connection.send(data)
        return False

    return behave


def by_path(behaviours: Mapping[str, Behaviour], otherwise: Behaviour | None = None) -> Behaviour:
    """Each path its own."""

    async def behave(request: Request, connection: Connection) -> bool:
        chosen = behaviours.get(request.path, otherwise or status(200))
        return await chosen(request, connection)

    return behave


def by_type(behaviours: Mapping[str, Behaviour], otherwise: Behaviour | None = None) -> Behaviour:
    """Each routing key its own, in structured as in binary mode."""

    async def behave(request: Request, connection: Connection) -> bool:
        kind = request.headers.get("ce-type") or request.json["type"]
        chosen = behaviours.get(kind, otherwise or status(200))
        return await chosen(request, connection)

    return behave


def answer(code: int, headers: Mapping[str, str] | None = None, body: bytes = b"") -> bytes:
    """The bytes of an answer; its length is said unless the headers say something about it."""
    try:
        phrase = HTTPStatus(code).phrase
    except ValueError:
        phrase = "Something Else"
    said = {name.lower(): value for name, value in (headers or {}).items()}
    if not said.keys() & {"content-length", "transfer-encoding"} and code not in (204, 304):
        said["content-length"] = str(len(body))
    lines = [f"HTTP/1.1 {code} {phrase}", *(f"{name}: {value}" for name, value in said.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class HttpSink:
    """Keeps what it is sent, and answers 200 unless it is told otherwise."""

    def __init__(self, *, ssl_context: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> None:
        self.requests: list[Request] = []
        self.connections = 0  # accepted so far
        self.under_way = 0  # requests that have no answer yet
        self.most_at_once = 0
        self._ssl_context = ssl_context
        self._host = host
        self.port = 0
        self._next: deque[Behaviour] = deque()
        self._otherwise: Behaviour = status(200)
        self._server: asyncio.Server | None = None
        self._stopped = asyncio.Event()
        self._serving: set[asyncio.Task[None]] = set()
        self._came = asyncio.Condition()

    @property
    def url(self) -> str:
        return f"{'http' if self._ssl_context is None else 'https'}://{self._host}:{self.port}"

    @property
    def ids(self) -> list[str]:
        """Of the CloudEvents that came, in their order."""
        return [request.headers.get("ce-id") or request.json["id"] for request in self.requests]

    def behave(self, behaviour: Behaviour, times: int | None = None) -> None:
        """Do this with the next requests, or with all that come after those."""
        if times is None:
            self._otherwise = behaviour
        else:
            self._next.extend([behaviour] * times)

    async def until(self, count: int) -> list[Request]:
        """Wait until so many requests have come, answered or not."""
        async with asyncio.timeout(PATIENCE), self._came:
            await self._came.wait_for(lambda: len(self.requests) >= count)
        return self.requests

    async def start(self) -> None:
        """Listen; again on the same port after a stop."""
        self._stopped = asyncio.Event()
        self._server = await asyncio.start_server(self._serve, self._host, self.port, ssl=self._ssl_context)
        self.port = self._server.sockets[0].getsockname()[1]

    def accept_no_more(self) -> None:
        """Refuse connections; those that there are go on."""
        assert self._server is not None
        self._server.close()

    async def stop(self) -> None:
        """Refuse connections, and cut those that there are."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        self._stopped.set()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await server.wait_closed()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await self._converse(Connection(reader, writer, self._stopped))
        except (OSError, EOFError, ValueError, asyncio.CancelledError):
            pass  # the client left or was cut: both are what tests are about
        finally:
            self._serving.discard(task)
            writer.transport.abort() if self._stopped.is_set() else writer.close()

    async def _converse(self, connection: Connection) -> None:
        while (request := await self._read(connection.reader)) is not None:
            self.under_way += 1
            self.most_at_once = max(self.most_at_once, self.under_way)
            async with self._came:
                self.requests.append(request)
                self._came.notify_all()
            behaviour = self._next.popleft() if self._next else self._otherwise
            try:
                if not await behaviour(request, connection):
                    return
            finally:
                self.under_way -= 1

    async def _read(self, reader: asyncio.StreamReader) -> Request | None:
        first = await reader.readline()
        if not first:
            return None
        method, path, _ = first.decode("latin-1").split(" ", 2)
        headers: dict[str, str] = {}
        while (line := (await reader.readline()).decode("latin-1").strip()) != "":
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        if headers.get("transfer-encoding", "").lower() == "chunked":
            body = await self._chunks(reader)
        else:
            body = await reader.readexactly(int(headers.get("content-length", "0")))
        return Request(method, path, headers, body)

    async def _chunks(self, reader: asyncio.StreamReader) -> bytes:
        body = b""
        while size := int((await reader.readline()).split(b";")[0], 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
        return body
