"""Proxy: stands between a process and PostgreSQL, and does to their connection what networks do.

It speaks just enough of the protocol to give every connection its process's name, and to cut one after the server's
answer has left the server and before the client hears it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Self, TypeVar

_NO_SSL = (80877103, 80877104)  # what a client asks first: SSL, or GSS encryption
_CANCEL = 80877102
_SIZE = 65536


CONFIRM = "basic.ack"


class Proxy:
    """An event loop in a thread of its own, with a link for each process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._links: list[Link] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def link(self, name: str, *server_ports: int) -> Link:
        """A port of its own for one process, to PostgreSQL."""
        return self.opened(lambda loop: Link(name, server_ports, loop))

    def broker_link(self, name: str, *server_ports: int) -> Link:
        """A port of its own for one process, to RabbitMQ."""
        return self.opened(lambda loop: AmqpLink(name, server_ports, loop))

    def opened(self, make: Callable[[asyncio.AbstractEventLoop], AnyLink]) -> AnyLink:
        """A link of any kind."""
        link = make(self._loop)
        self._run(link.open())
        self._links.append(link)
        return link

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _end(self) -> None:
        for link in self._links:
            link.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Link:
    """Every connection of one process. What is set here holds for those that are open and those to come."""

    _kind: ClassVar[type[Pair]]

    def __init__(self, name: str, server_ports: Sequence[int], loop: asyncio.AbstractEventLoop) -> None:
        self.name = name  # what PostgreSQL will know connections by
        self.port = 0
        self.server_ports = tuple(server_ports)  # a new connection leads to the first of them that takes it
        self._loop = loop
        self._pairs: set[Pair] = set()
        self._server: asyncio.Server | None = None
        self.swallows = False
        self.delay = 0.0
        self.tripwire: frozenset[bytes] = frozenset()
        self.tripped = threading.Event()
        self._hangs = False  # at the tripwire, instead of being cut

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._pairs)

    # What a fault may do; callable from any thread.

    def cut(self) -> int:
        """Reset every connection, as a router that lost its memory would; how many there were."""
        count = self.connections
        self._loop.call_soon_threadsafe(self._cut_all)
        return count

    def swallow(self) -> None:
        """Take what is sent and pass nothing on: no answer, no end, no error."""
        self.swallows = True

    def slow_down(self, seconds: float) -> None:
        """Hold back everything that is sent, in both directions, for so long."""
        self.delay = seconds

    def trip_at(self, commands: Collection[str], *, hangs: bool = False) -> None:
        """Cut the next connection on which the server says that it completed one of these commands; or swallow."""
        self.tripped.clear()
        self._hangs = hangs
        self.tripwire = frozenset(command.encode() for command in commands)

    def heal(self) -> None:
        """Behave. What was swallowed is gone, so its connections are cut."""
        swallowed, self.swallows = self.swallows, False
        self.delay = 0.0
        if swallowed:
            self.cut()

    # Inside of the proxy's own thread.

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pair = self._kind(self, reader, writer)
        self._pairs.add(pair)
        try:
            await pair.serve()
        except (OSError, asyncio.IncompleteReadError):
            pass  # one side is gone, or was never there: the other is told below
        finally:
            self._pairs.discard(pair)
            pair.reset()

    def _cut_all(self) -> None:
        for pair in list(self._pairs):
            pair.reset()

    def cuts(self, message: bytes) -> bool:
        """Whether the connection is cut at this message of the server."""
        if not self.trips(message):
            return False
        self.swallows = self.swallows or self._hangs
        return not self._hangs

    def trips(self, message: bytes) -> bool:
        """Whether a message of the server is what the tripwire waits for."""
        if not self.tripwire or message[:1] != b"C":
            return False
        command = message[5:].rstrip(b"\0").partition(b" ")[0]
        if command not in self.tripwire:
            return False
        self.tripwire = frozenset()
        self.tripped.set()
        return True


AnyLink = TypeVar("AnyLink", bound=Link)


class AmqpLink(Link):
    """Connections to a RabbitMQ."""

    def trips(self, message: bytes) -> bool:
        """Whether a frame of the broker confirms a message, and the tripwire waits for that."""
        if not self.tripwire or message[:1] != b"\x01" or message[7:11] != b"\x00\x3c\x00\x50":
            return False
        self.tripwire = frozenset()
        self.tripped.set()
        return True


class Pair:
    """One connection of a client, and ours to the server."""

    def __init__(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._link = link
        self._client, self._to_client = reader, writer
        self._to_server: asyncio.StreamWriter | None = None
        self.is_cut = False  # what is still heard is not answered

    async def serve(self) -> None:
        greeting = await self._greeting()
        server, self._to_server = await self._reach()
        self._to_server.write(greeting)
        pumps = [asyncio.ensure_future(self._ask()), asyncio.ensure_future(self._answer(server))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def reset(self) -> None:
        """End both sides at once and rudely: RST, not FIN."""
        for writer in (self._to_client, self._to_server):
            if writer is None:
                continue
            with suppress(OSError):
                raw: socket.socket = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _reach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """To the first server that is there, as a load balancer does."""
        *others, last = self._link.server_ports
        for port in others:
            with suppress(ConnectionRefusedError):
                return await asyncio.open_connection("127.0.0.1", port)
        return await asyncio.open_connection("127.0.0.1", last)

    async def _greeting(self) -> bytes:
        """The client's first message, with the link's name in it; encryption is declined on the server's behalf."""
        while True:
            head = await self._client.readexactly(8)
            length, code = struct.unpack("!II", head)
            rest = await self._client.readexactly(length - 8)
            while self._link.swallows:
                await asyncio.sleep(0.05)
            if code in _NO_SSL:
                self._to_client.write(b"N")
            elif code == _CANCEL:
                return head + rest
            else:
                named = rest[:-1] + b"application_name\0" + self._link.name.encode() + b"\0\0"
                return struct.pack("!II", len(named) + 8, code) + named

    async def _ask(self) -> None:
        assert self._to_server is not None
        while data := await self._client.read(_SIZE):
            await self._pass_on(data, self._to_server)

    async def _answer(self, server: asyncio.StreamReader) -> None:
        """Whole messages only: a type, a length that counts itself, and the rest."""
        held = b""
        while data := await server.read(_SIZE):
            held += data
            start = 0
            while end := self._end_of_message(held, start):
                if self._link.cuts(held[start : min(end, start + 64)]):
                    self.reset()
                    return
                start = end
            await self._pass_on(held[:start], self._to_client)
            held = held[start:]

    def _end_of_message(self, held: bytes, start: int) -> int:
        """Where the message that starts here ends; 0 if it has not come to its end yet."""
        if len(held) - start < 5:
            return 0
        end = start + 1 + int.from_bytes(held[start + 1 : start + 5], "big")
        return end if end <= len(held) else 0

    async def _pass_on(self, data: bytes, to: asyncio.StreamWriter) -> None:
        if self._link.delay:
            await asyncio.sleep(self._link.delay)
        if data and not self._link.swallows:
            to.write(data)
            await to.drain()


class _AmqpPair(Pair):
    """Frames: a type, a channel, a length, the rest, and an end."""

    async def _greeting(self) -> bytes:
        greeting = await self._client.readexactly(8)
        while self._link.swallows:
            await asyncio.sleep(0.05)
        return greeting

    def _end_of_message(self, held: bytes, start: int) -> int:
        if len(held) - start < 7:
            return 0
        end = start + 8 + int.from_bytes(held[start + 3 : start + 7], "big")
        return end if end <= len(held) else 0


Link._kind = Pair
AmqpLink._kind = _AmqpPair
