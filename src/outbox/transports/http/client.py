"""HttpClient: requests and their answers over connections that are kept.

The connections, and reading what comes over them, are aiohttp's. Its session is left out: what it does for every
request anew, cookies, redirects, proxies, costs more than all the rest and must not happen here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.http import HttpProcessingError
from yarl import URL

from outbox.core.errors import HeaderInvalid
from outbox.transports.http.answers import is_taken

BODY_WITHIN = 3.0  # seconds for the rest of an answer whose status is known
GONE_OUT_EVERY = 0.01  # seconds between two looks at a request that was answered before it had gone out
LARGEST_ANSWER = 64 * 1024  # bytes that are read; after more the connection is closed

_END_OF_HEADERS = b"\r\n\r\n"
_WITHOUT_END = aiohttp.ClientTimeout(total=None)  # the caller has a deadline


class HttpClient:
    """Posts to one URL. It follows no redirects, keeps no cookies and asks no environment for proxies."""

    def __init__(self, url: URL, headers: Mapping[str, str], connector: aiohttp.TCPConnector) -> None:
        self._connector = connector
        self._request = aiohttp.ClientRequest("POST", url, loop=asyncio.get_running_loop())  # what connects, no more
        first = f"POST {url.raw_path_qs} HTTP/1.1\r\nhost: {self._request.headers['host']}\r\n"
        self._head = first + _lines(headers.items())

    async def close(self) -> None:
        await self._connector.close()

    def request(self, headers: Mapping[str, str], body: bytes) -> bytes:
        """A request as it travels. Raises what is wrong with its headers."""
        return f"{self._head}{_lines(headers.items())}content-length: {len(body)}\r\n\r\n".encode("ascii") + body

    async def post(self, request: bytes, went_out: Callable[[], None]) -> HttpAnswer:
        """What was answered, as soon as its status is known; it must be read then. Tells when the request goes out."""
        connection = await self._connector.connect(self._request, [], _WITHOUT_END)
        try:
            return await _answer(connection, request, went_out)
        except BaseException:
            _hang_up(connection)
            raise


@dataclass(slots=True)
class HttpAnswer:
    """The status of an answer, and the rest of it, which is still to come."""

    status: int
    headers: Mapping[str, str]  # whatever the case of their names
    _rest: aiohttp.StreamReader
    _connection: Any

    async def read(self) -> bytes:
        """The body up to a limit, however it ends: the status counts. The connection is free then."""
        said = b""
        try:
            if not self._rest.at_eof():
                with suppress(aiohttp.ClientError, OSError):  # a TimeoutError is one of the latter
                    async with asyncio.timeout(BODY_WITHIN):
                        said = await self._pieces()
        finally:
            self._leave()
        return said

    async def _pieces(self) -> bytes:
        said = b""
        while len(said) < LARGEST_ANSWER and (piece := await self._rest.read(LARGEST_ANSWER - len(said))):
            said += piece
        return said

    def _leave(self) -> None:
        """Keep the connection if both have said everything."""
        transport = self._connection.transport
        if transport is not None and self._rest.at_eof() and not _unsent(_carriers(transport)):
            self._connection.release()
        else:
            _hang_up(self._connection)


async def _answer(connection: Any, request: bytes, went_out: Callable[[], None]) -> HttpAnswer:
    protocol, transport = connection.protocol, connection.transport
    if transport is None or protocol.should_close:
        # What came unasked over a kept connection would be taken for the answer to this request.
        raise aiohttp.ServerDisconnectedError("the connection was of no use any more")
    protocol.set_response_params(read_until_eof=True, auto_decompress=False)
    protocol._parser = _Parser(protocol)
    transport.write(request)
    went_out()
    try:
        message, rest = await protocol.read()
        while 100 <= message.code <= 199 and message.code != 101:  # not yet the answer
            message, rest = await protocol.read()
    except HttpProcessingError as error:
        raise aiohttp.ClientError(f"this is no HTTP: {error.message}") from error
    if is_taken(message.code):
        await _gone_out(transport)
    return HttpAnswer(message.code, message.headers, rest, connection)


class _Parser:
    """aiohttp's, but an answer counts although what follows its headers is no HTTP: the body of a 204, for example."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._parser = protocol._parser

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def feed_data(self, data: bytes) -> tuple[Sequence[Any], bool, bytes]:
        """The answers in it, whether the connection is for something else now, and what came of that."""
        head, end, rest = data.partition(_END_OF_HEADERS)
        found: tuple[Sequence[Any], bool, bytes] = self._parser.feed_data(head + end)
        answers, upgraded, tail = found
        if upgraded or not rest:
            return answers, upgraded, tail + rest
        try:
            more, upgraded, tail = self._parser.feed_data(rest)
        except HttpProcessingError:
            if not any(answer.code >= 200 for answer, _ in answers):
                raise
            self._protocol.force_close()
            return found
        return [*answers, *more], upgraded, tail


async def _gone_out(transport: Any) -> None:
    """No destination has taken what was not sent yet, whatever it answers."""
    carriers = _carriers(transport)
    while _unsent(carriers):
        await asyncio.sleep(GONE_OUT_EVERY)
        if any(each.is_closing() for each in carriers):
            raise aiohttp.ClientPayloadError("it answered, and hung up before it had the whole message")


def _unsent(carriers: Iterable[Any]) -> int:
    """Bytes that the network has not taken yet."""
    return sum(each.get_write_buffer_size() for each in carriers)


def _carriers(transport: Any) -> list[Any]:
    """The transport, and the one beneath it in which waits what TLS has encrypted."""
    beneath = getattr(getattr(transport, "_ssl_protocol", None), "_transport", None)
    return [transport] if beneath is None else [transport, beneath]


def _hang_up(connection: Any) -> None:
    """At once, without waiting until the other side has read what was still to be sent."""
    if connection.transport is not None:
        connection.transport.abort()
    connection.close()


def _lines(headers: Iterable[tuple[str, str]]) -> str:
    lines = []
    for name, value in headers:
        if not value.isprintable():
            raise HeaderInvalid(f"the header {name!r} contains a control character")
        lines.append(f"{name}: {value}\r\n")
    return "".join(lines)
