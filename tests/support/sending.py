"""Sending: a real web server on loopback around an application, and senders that keep the rules of HTTP, or do not."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from outbox.core.webhooks import Secrets, sign
from tests.support.observing import PATIENCE, eventually

STRUCTURED = {"content-type": "application/cloudevents+json"}
BATCHED = {"content-type": "application/cloudevents-batch+json"}

Message = tuple[Mapping[str, str], bytes]  # headers and body of a request


@dataclass(frozen=True)
class Answered:
    """What a server said."""

    status: int
    headers: Mapping[str, str]
    line: str

    @property
    def is_taken(self) -> bool:
        return 200 <= self.status < 300


@dataclass(frozen=True)
class Sender:
    """Sends requests to a port of this machine, each on a connection of its own."""

    port: int

    async def post(self, headers: Mapping[str, str], body: bytes, path: str = "/", method: str = "POST") -> Answered:
        """An ordinary request."""
        return await self.raw(head(headers, path, method, length=len(body)), body)

    async def raw(self, *parts: bytes) -> Answered:
        """Send these bytes, whatever they are; what the server answers to the first request in them."""
        async with self.connection() as (reader, writer):
            for part in parts:
                writer.write(part)
                await writer.drain()
            return await answer(reader)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


def head(
    headers: Mapping[str, str], path: str = "/", method: str = "POST", *, length: int | str | None = None
) -> bytes:
    """What stands before a body."""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", *(f"{name}: {value}" for name, value in headers.items())]
    if length is not None:
        lines.append(f"content-length: {length}")
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


async def answer(reader: asyncio.StreamReader) -> Answered:
    """The next answer on a connection."""
    async with asyncio.timeout(PATIENCE):
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Answered(int(status.split()[1]), headers, body.decode().strip())


def attributes(id: str = "1", type: str = "order.created", source: str = "/shop", **further: Any) -> dict[str, Any]:
    return {"specversion": "1.0", "id": id, "source": source, "type": type, **further}


def structured(data: Any = 1, **given: Any) -> Message:
    """An event in a body of its own."""
    return STRUCTURED, json.dumps(attributes(**given) | {"data": data}).encode()


def binary(data: Any = 1, **given: Any) -> Message:
    """An event whose attributes are headers."""
    headers = {f"ce-{name}": value for name, value in attributes(**given).items()}
    return {"content-type": "application/json", **headers}, json.dumps(data).encode()


def batched(*events: Mapping[str, Any]) -> Message:
    """Many events in one body."""
    return BATCHED, json.dumps(events).encode()


def webhook(body: bytes = b'{"type":"order.created"}', id: str = "msg_1") -> Message:
    """A webhook that is no event, not signed yet."""
    return {"content-type": "application/json", "webhook-id": id}, body


def signed(message: Message, *secrets: str, id: str = "msg_1", at: float | None = None) -> Message:
    """The same, signed as Standard Webhooks says."""
    headers, body = message
    return {**headers, **sign(Secrets(*secrets), id, int(time.time() if at is None else at), body)}, body


class Server(uvicorn.Server):
    """One that leaves the signals to pytest."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(app: Any, *, lifespan: str = "on") -> AsyncIterator[Sender]:
    """A server around an application, from its startup to its shutdown."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, ws="none", lifespan=lifespan)  # type: ignore[arg-type]
    server = Server(config)
    task = asyncio.create_task(server.serve([listening]))
    try:
        await eventually(lambda: server.started or task.done())
        yield Sender(listening.getsockname()[1])
    finally:
        server.should_exit = True
        await task
        listening.close()
