"""Private interfaces of other libraries that transports use: each is named here with the versions it was seen with.

After an update of a library a failure says which file depends on it, before a message is lost.
"""

from __future__ import annotations

import asyncio
import inspect
from asyncio import sslproto
from importlib.metadata import version

import aiohttp
import aiormq
import pytest
from aiohttp.client_proto import ResponseHandler
from aiormq.connection import FrameReceiver
from pamqp.header import ContentHeader

SEEN = {"aiohttp": ("3.13.4", "3.14.5"), "aiormq": ("7.2.4",), "pamqp": ("4.0.1",), "Python": ("3.11", "3.14")}


def gone(library: str, what: str, file: str, then: str) -> str:
    """What to say when it is not there any more."""
    installed = "" if library == "Python" else f" {version(library)}"
    seen = " to ".join(SEEN[library])
    return f"{library}{installed} has no {what}, which was there in {seen}: see outbox/transports/{file}, {then}"


@pytest.fixture
async def protocol() -> ResponseHandler:
    return ResponseHandler(asyncio.get_running_loop())


async def test_aiohttp_reads_answers_by_a_parser_that_can_be_replaced(protocol: ResponseHandler) -> None:
    message = gone("aiohttp", "ResponseHandler._parser", "http/client.py", "where answers are read by it")
    assert hasattr(protocol, "_parser"), message
    protocol.set_response_params(read_until_eof=True, auto_decompress=False)
    assert hasattr(protocol._parser, "feed_data"), message
    assert "self._parser.feed_data(" in inspect.getsource(ResponseHandler.data_received), message


async def test_aiohttp_gives_out_connections_without_a_session(protocol: ResponseHandler) -> None:
    message = gone("aiohttp", "way to connect without a session", "http/client.py", "where HttpClient connects")
    assert {"should_close", "force_close", "read", "set_response_params"} <= set(dir(protocol)), message
    assert list(inspect.signature(aiohttp.TCPConnector.connect).parameters)[:4] == [
        "self",
        "req",
        "traces",
        "timeout",
    ], message


def test_asyncio_keeps_the_transport_beneath_tls() -> None:
    message = gone("Python", "_ssl_protocol._transport", "http/client.py", "where bytes that were not sent are counted")
    assert "self._ssl_protocol = " in inspect.getsource(sslproto._SSLProtocolTransport.__init__), message
    assert "self._transport = " in inspect.getsource(sslproto.SSLProtocol.__init__), message
    assert hasattr(sslproto._SSLProtocolTransport, "get_write_buffer_size"), message


def test_aiormq_reads_frames_in_a_task_that_can_be_found() -> None:
    message = gone("aiormq", "task with a frame_receiver", "rabbitmq/guarding.py", "where FrameGuard stands before it")
    source = inspect.getsource(aiormq.Connection)
    assert "self._reader_task" in source, message
    assert "frame_receiver" in source, message
    assert inspect.iscoroutinefunction(FrameReceiver.get_frame), message


def test_pamqp_reads_properties_behind_twelve_bytes() -> None:
    message = gone("pamqp", "ContentHeader.unmarshal", "rabbitmq/delivery.py", "where `raw` is built")
    header = ContentHeader()
    header.unmarshal(b"\x00" * 12 + b"\x80\x00\x03a/b")
    assert header.properties.content_type == "a/b", message
