"""Doorway: how relays reach an application that takes messages over HTTP, and what can go wrong on the way.

Each relay has a link of its own, which reads whole requests and answers, and remembers who was told what.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self
from urllib.parse import unquote

from tests.chaos.evidence import Asked
from tests.chaos.fates import UNANSWERED
from tests.support.proxy import Link, Pair, Proxy

SECRET = "whsec_" + "b3V0Ym94" * 4
TAKEN = "taken"  # what a tripwire waits for
NO_ANSWER = 0  # instead of a status: the connection is reset
REFUSALS = (503, 500, 429)
LAST_WORDS = 0.2  # seconds in which a connection that is cut still hears what was sent before
AGAIN = 1  # second after which whoever is turned away may come again


class HttpLink(Link):
    """Connections of one relay. What is set here holds for those that are open and those to come."""

    def __init__(self, name: str, behind: Path, loop: asyncio.AbstractEventLoop, unanswered: set[str]) -> None:
        super().__init__(name, (), loop)
        self.behind = behind
        self.unanswered = unanswered  # ids of messages at which the application hung, whatever relay sent them
        self.hangs = True  # at some messages, when they come for the first time
        self.asked: list[Asked] = []
        self.status: int | None = None  # what everybody is told instead of being let in
        self._place = socket.socket()  # keeps the port while nobody listens at it

    # What a fault may do; callable from any thread.

    def turn_away(self, status: int) -> None:
        """Answer every request with this status, or with a reset connection."""
        self.status = status

    def answer_everything(self) -> None:
        """Hang at nothing any more; whoever still waits is cut off."""
        self.hangs = False
        self._loop.call_soon_threadsafe(self._cut_hanging)

    def leave(self) -> None:
        """Be unreachable: connections are reset, and new ones refused."""
        self._loop.call_soon_threadsafe(super().close)
        self.cut()

    def come_back(self) -> None:
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(30)

    def heal(self) -> None:
        self.status = None
        super().heal()

    # Inside of the proxy's own thread.

    async def open(self) -> None:
        self._place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._place.bind(("127.0.0.1", 0))
        self.port = self._place.getsockname()[1]
        await self._listen()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, reuse_address=True)

    def close(self) -> None:
        super().close()
        self._place.close()

    def _cut_all(self) -> None:
        """A request that is on its way is read first, so that it is remembered; nobody is told anything any more."""
        for pair in self._pairs:
            pair.is_cut = True
            self._loop.call_later(LAST_WORDS, pair.reset)

    def _cut_hanging(self) -> None:
        for pair in self._pairs:
            if isinstance(pair, _HttpPair) and pair.is_hanging:
                pair.reset()

    def hangs_at(self, head: bytes, body: bytes) -> bool:
        """Whether the application does not answer this request, though it answers others."""
        message_id = _message_id(head)
        if not self.hangs or message_id in self.unanswered or f'"{UNANSWERED}"'.encode() not in body:
            return False
        self.unanswered.add(message_id)
        return True

    def trips(self, message: bytes) -> bool:
        """Whether the tripwire waits for an answer, and this one says that a message was taken."""
        if not self.tripwire or not message.startswith(b"HTTP/1.1 2"):
            return False
        self.tripwire = frozenset()
        self.tripped.set()
        return True


class _HttpPair(Pair):
    """Requests and answers, one after another."""

    _link: HttpLink
    is_hanging = False

    async def serve(self) -> None:
        server: asyncio.StreamReader | None = None
        while True:
            head, body = await _whole(self._client)
            began, status = time.time(), None
            try:
                if self._link.swallows or self.is_cut:
                    await self._client.read()  # until it is reset
                    return
                if self._link.hangs_at(head, body):
                    self.is_hanging = True
                    await self._client.read()  # until its relay gives up
                    return
                if self._link.status is None:
                    if self._to_server is None:
                        server, self._to_server = await asyncio.open_unix_connection(self._link.behind)
                    await self._pass_on(head + body, self._to_server)
                    assert server is not None
                    answer = b"".join(await _whole(server))
                else:
                    answer = _refusal(self._link.status)
                if not answer or self.is_cut or self._link.swallows or self._link.trips(answer):
                    return
                await self._pass_on(answer, self._to_client)
                status = int(answer.split(b" ", 2)[1])
            finally:
                self._link.asked.append(Asked(self._link.name, _message_id(head), began, time.time(), status))


HttpLink._kind = _HttpPair


async def _whole(stream: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """The head and the body of a request or an answer; both say how long the body is."""
    head = await stream.readuntil(b"\r\n\r\n")
    return head, await stream.readexactly(int(_header(head, b"content-length")))


def _header(head: bytes, name: bytes) -> bytes:
    for line in head.split(b"\r\n"):
        said, _, value = line.partition(b":")
        if said.lower() == name:
            return value.strip()
    raise ValueError(f"no {name.decode()} in {head!r}")


def _message_id(head: bytes) -> str:
    """As its relay knows it."""
    return unquote(_header(head, b"webhook-id").decode())


def _refusal(status: int) -> bytes:
    """What is told instead; nothing where the connection is to be reset."""
    if status == NO_ANSWER:
        return b""
    return f"HTTP/1.1 {status} Not now\r\nretry-after: {AGAIN}\r\ncontent-length: 0\r\n\r\n".encode()


class Doorway:
    """Where the application listens, with a link before it for each relay."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._proxy = Proxy()
        self.links: list[HttpLink] = []
        self._unanswered: set[str] = set()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="outbox-chaos-"))
            self.socket = Path(folder) / "socket"
            stack.enter_context(self._proxy)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def link(self, name: str) -> HttpLink:
        link = self._proxy.opened(lambda loop: HttpLink(name, self.socket, loop, self._unanswered))
        self.links.append(link)
        return link

    @property
    def hanging(self) -> int:
        """How many messages hung here so far."""
        return len(self._unanswered)

    def answer_everything(self) -> None:
        """Be an application that hangs at nothing."""
        for link in self.links:
            link.answer_everything()

    def asked(self) -> tuple[Asked, ...]:
        """Every request that came, in the order of their ends."""
        return tuple(sorted((each for link in self.links for each in link.asked), key=lambda each: each.ended))
