"""The HTTP transport against a server that misbehaves: what each answer means, and what silence means."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp.abc import AbstractResolver

from outbox import Message
from outbox.core.transport import Defaults, Published
from outbox.core.webhooks import Secrets, verify
from outbox.transports import http
from outbox.transports.http import HttpTransport, client
from tests.support.http_sink import (
    Behaviour,
    Connection,
    HttpSink,
    Request,
    answer,
    by_type,
    close,
    drip,
    drip_body,
    endless,
    garbage,
    hang,
    last_words,
    redirect,
    reset,
    status,
    wrong_length,
)

from .certificates import make_certificates

SHORT = 1.5  # seconds for answers that must not come
LONG = 20  # seconds for answers that must


@pytest.fixture
async def sink() -> AsyncIterator[HttpSink]:
    async with HttpSink() as sink:
        yield sink


@asynccontextmanager
async def opened(transport: HttpTransport) -> AsyncIterator[HttpTransport]:
    await transport.open()
    try:
        yield transport
    finally:
        await transport.close()


def message(routing_key: str = "order.created", **fields: Any) -> Message:
    return Message(**{"routing_key": routing_key, "body": b'{"id":1}', **fields})


async def published(sink: HttpSink, *messages: Message, within: float = LONG, **options: Any) -> Published:
    async with opened(HttpTransport(sink.url, timeout=within, **options)) as transport:
        return await transport.publish(messages or [message()])


# Answers.


@pytest.mark.parametrize("code", [200, 201, 202, 204, 299])
async def test_2xx_is_sent(sink: HttpSink, code: int) -> None:
    sink.behave(status(code))
    sent = message()
    found = await published(sink, sent)
    assert (found.confirmed, found.refused) == ({sent.id}, {})


@pytest.mark.parametrize("code", [408, 425, 429, 500, 502, 503, 504])
async def test_not_now_is_a_refusal_that_may_change(sink: HttpSink, code: int) -> None:
    sink.behave(status(code, {"Retry-After": "7"}, b"later"))
    sent = message()
    found = (await published(sink, sent)).refused[sent.id]
    assert (found.permanent, found.retry_after) == (False, timedelta(seconds=7))
    assert f"127.0.0.1:{sink.port}: it answered {code}" in found.error
    assert "later" in found.error


@pytest.mark.parametrize("code", [300, 304, 400, 401, 403, 404, 405, 409, 410, 413, 415, 422])
async def test_never_is_a_refusal_for_good(sink: HttpSink, code: int) -> None:
    sink.behave(status(code))
    sent = message()
    found = (await published(sink, sent)).refused[sent.id]
    assert (found.permanent, found.retry_after) == (True, None)


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
async def test_redirects_are_not_followed(sink: HttpSink, code: int) -> None:
    sent = message()
    async with HttpSink() as elsewhere:
        sink.behave(redirect(elsewhere.url, code))
        found = await published(sink, sent)
        assert elsewhere.connections == 0
    assert found.refused[sent.id].permanent
    assert len(sink.requests) == 1


@pytest.mark.parametrize(
    "behaviour",
    [
        pytest.param(drip_body(0.5), id="a body that drips"),
        pytest.param(wrong_length(1000), id="a body that is too short"),
        pytest.param(wrong_length(2), id="a body that is too long"),
        pytest.param(status(204, {"content-length": "2"}, b"ok"), id="a body where there is none"),
        pytest.param(status(200, {"transfer-encoding": "chunked"}, b"no chunk\r\n"), id="a body that is no chunk"),
        pytest.param(endless(), id="a body without end"),
        pytest.param(status(200, body=b"x" * 1_000_000), id="a large body"),
        pytest.param(status(200, {"content-encoding": "gzip"}, b"no gzip"), id="a body that is no gzip"),
    ],
)
async def test_the_status_counts_whatever_the_body_does(
    sink: HttpSink, behaviour: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "BODY_WITHIN", 1.0)
    sink.behave(behaviour)
    sent = message()
    found = await published(sink, sent)
    assert (found.confirmed, found.refused) == ({sent.id}, {})
    sink.behave(status(200))
    assert (await published(sink, sent)).confirmed


async def test_an_error_holds_no_more_of_an_endless_answer_than_its_beginning(sink: HttpSink) -> None:
    sink.behave(endless(500))
    sent = message()
    found = (await published(sink, sent)).refused[sent.id]
    assert len(found.error) < 500


async def test_interim_answers_are_passed_by(sink: HttpSink) -> None:
    sink.behave(garbage(b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"))
    sent = message()
    assert (await published(sink, sent)).confirmed == {sent.id}


# No answer.

SILENCES: dict[str, Behaviour] = {
    "hangs": hang(),
    "resets": reset(),
    "closes": close(),
    "drips": drip(1.0),
    "no HTTP": garbage(),
    "half a status": garbage(b"HTTP/1.1 20"),
    "half a header": garbage(b"HTTP/1.1 200 OK\r\ncontent-len"),
    "endless headers": garbage(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 1_000_000),
    "headers without end": garbage(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200_000),
}


@pytest.mark.parametrize("kind", SILENCES)
async def test_silence_leaves_a_message_in_doubt(sink: HttpSink, kind: str) -> None:
    sink.behave(SILENCES[kind])
    found = await published(sink, message(), message(), within=1)
    assert (found.confirmed, found.refused) == (frozenset(), {})
    assert len(sink.requests) == 2


@pytest.mark.parametrize("kind", SILENCES)
async def test_silence_about_one_while_others_are_answered_counts_against_it(sink: HttpSink, kind: str) -> None:
    sink.behave(by_type({"poison": SILENCES[kind]}))
    poison, others = message("poison"), [message() for _ in range(5)]
    found = await published(sink, poison, *others, within=SHORT)
    assert found.confirmed == {other.id for other in others}
    assert set(found.refused) == {poison.id}
    assert not found.refused[poison.id].permanent
    assert "answers others" in found.refused[poison.id].error


async def test_silence_about_a_message_again_after_others_were_answered_counts_against_it(sink: HttpSink) -> None:
    sink.behave(by_type({"poison": hang()}))
    poison, another = message("poison"), message("poison")
    async with opened(HttpTransport(sink.url, timeout=0.6)) as transport:
        assert [(await transport.publish([each])).refused for each in (poison, poison, another)] == [{}] * 3
        assert (await transport.publish([message()])).confirmed
        assert (await transport.publish([poison, another])).refused == {}, "with others it may be an outage"
        found = await transport.publish([poison])
        assert set(found.refused) == {poison.id}
        assert (found.answered, found.asked) == (False, False), "which says nothing of the destination now"
        assert (await transport.publish([poison])).refused == {}, "nothing was answered since"


async def test_what_never_went_out_is_in_doubt_although_others_are_answered(sink: HttpSink) -> None:
    async with opened(HttpTransport(sink.url, timeout=LONG)) as transport:
        first, second, third = message(), message(), message()
        assert (await transport.publish([first])).confirmed
        sink.accept_no_more()
        found = await transport.publish([second, third])  # one over the connection that is kept, one over none
        assert (len(found.confirmed), found.refused) == (1, {})
        assert "Connect" in found.silence
        assert len(sink.requests) == 2


async def test_whoever_is_cancelled_posts_nothing_more(sink: HttpSink) -> None:
    sink.behave(hang(), times=1)
    async with opened(HttpTransport(sink.url, timeout=LONG, concurrency=1)) as transport:
        publishing = asyncio.create_task(transport.publish([message(), message()]))
        await sink.until(1)
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        assert len(sink.requests) == 1


@pytest.mark.parametrize("kind", SILENCES)
async def test_no_error_shows_what_may_be_secret_in_a_url(sink: HttpSink, kind: str) -> None:
    sink.behave(by_type({"poison": SILENCES[kind], "refused": status(500)}))
    url = f"{sink.url.replace('//', '//user:c4n4ry@')}/c4n4ry?token=c4n4ry"
    async with opened(HttpTransport(url, timeout=SHORT)) as transport:
        found = await transport.publish([message("poison"), message("refused"), message()])
    assert len(found.refused) == 2
    assert "c4n4ry" not in repr(found)


@pytest.mark.parametrize(
    "first", [b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n", b""], ids=["answer", "no HTTP"]
)
async def test_a_destination_that_repeats_a_request_shows_no_secret(first: bytes) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(first + await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        url = f"http://user:password@127.0.0.1:{port}/hook/T0K3Nxxxxxxxxxx?token=c4n4ry&password&c4n4ryAlone"
        headers = {"x-api-key": "c4n4ry-c4n4ry", "x-signature": "Bearer c4n4ry.c4n4ry"}
        async with opened(HttpTransport(url, headers=headers)) as transport:
            found = await transport.publish([message()])
    assert "POST /hook/***?token=***&***&***" in repr(found)
    assert "T0K3N" not in repr(found)
    assert "c4n4ry" not in repr(found)
    assert "dXNlcjpwYXNzd29yZA" not in repr(found)


async def test_answers_from_before_a_request_began_say_nothing_about_its_silence(sink: HttpSink) -> None:
    async with opened(HttpTransport(sink.url, timeout=SHORT)) as transport:
        assert (await transport.publish([message()])).confirmed
        sink.behave(hang())
        found = await transport.publish([message()])
    assert (found.confirmed, found.refused) == (frozenset(), {})


async def test_nobody_there_leaves_everything_in_doubt(sink: HttpSink) -> None:
    async with opened(HttpTransport(sink.url, timeout=LONG)) as transport:
        assert (await transport.publish([message()])).confirmed
        await sink.stop()
        found = await transport.publish([message(), message()])
        assert (found.confirmed, found.refused) == (frozenset(), {})
        await sink.start()
        assert (await transport.publish([message()])).confirmed


async def test_a_host_that_does_not_exist_leaves_everything_in_doubt() -> None:
    class Nowhere(AbstractResolver):
        async def resolve(self, host: str, port: int = 0, family: Any = 0) -> Any:
            raise OSError(f"{host} is unknown")

        async def close(self) -> None: ...

    async with opened(HttpTransport("https://hooks.example.com/", resolver=Nowhere())) as transport:
        found = await transport.publish([message()])
    assert (found.confirmed, found.refused) == (frozenset(), {})


# Time.


async def test_what_cannot_be_answered_in_the_relays_time_is_not_begun(
    sink: HttpSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "BATCH_WITHIN", timedelta(seconds=1.6 * SHORT))
    sink.behave(hang())
    found = await published(sink, *(message() for _ in range(10)), within=SHORT, concurrency=2)
    assert (found.confirmed, found.refused) == (frozenset(), {})
    assert len(sink.requests) == 2


async def test_a_batch_that_got_no_turn_has_asked_nothing(sink: HttpSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """The destination is slow, and not away."""
    monkeypatch.setattr(http, "BATCH_WITHIN", timedelta(seconds=LONG + 1))
    sink.behave(hang(SHORT))
    first, second = message(), message()
    async with opened(HttpTransport(sink.url, concurrency=1, timeout=LONG)) as transport:
        slow = asyncio.create_task(transport.publish([first]))
        await sink.until(1)
        found = await transport.publish([second])
        assert (found.answered, found.asked) == (False, False)
        found = await slow
    assert (found.confirmed, found.asked) == ({first.id}, True)


async def test_no_more_requests_are_under_way_than_asked_for(sink: HttpSink) -> None:
    sink.behave(hang(0.02))
    async with opened(HttpTransport(sink.url, concurrency=3)) as transport:
        found = await asyncio.gather(*(transport.publish([message() for _ in range(10)]) for _ in range(4)))
    assert sum(len(each.confirmed) for each in found) == 40
    assert sink.most_at_once == 3


async def test_a_slow_destination_answers_every_batch_a_little(sink: HttpSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that got no answer at all would be taken for an outage."""
    monkeypatch.setattr(http, "BATCH_WITHIN", timedelta(seconds=LONG + 3))
    sink.behave(hang(0.3))
    async with opened(HttpTransport(sink.url, concurrency=2, timeout=LONG)) as transport:
        found = await asyncio.gather(*(transport.publish([message() for _ in range(20)]) for _ in range(4)))
    assert all(each.confirmed for each in found)
    assert sum(len(each.confirmed) for each in found) < 80


async def test_connections_are_used_again(sink: HttpSink) -> None:
    async with opened(HttpTransport(sink.url, concurrency=4)) as transport:
        for _ in range(5):
            await transport.publish([message() for _ in range(40)])
    assert len(sink.requests) == 200
    assert sink.connections <= 8  # a stall may cost one or the other


@pytest.mark.parametrize("unasked", [200, 408])
async def test_what_a_server_says_unasked_is_no_answer_to_the_next_request(sink: HttpSink, unasked: int) -> None:
    heard, said = asyncio.Event(), asyncio.Event()

    async def answer_twice(request: Request, connection: Connection) -> bool:
        await connection.send(answer(200))
        await heard.wait()
        await connection.send(answer(unasked))
        said.set()
        return True

    async with opened(HttpTransport(sink.url, timeout=LONG)) as transport:
        sink.behave(answer_twice, times=1)
        sink.behave(status(503))
        first, second = message(), message()
        assert (await transport.publish([first])).confirmed == {first.id}
        heard.set()
        await said.wait()
        await asyncio.sleep(0.1)  # the loop reads what has come
        found = await transport.publish([second])
        assert found.confirmed == frozenset()
        assert "503" in found.refused[second.id].error


async def test_a_connection_that_is_closed_under_a_request_costs_nothing(
    sink: HttpSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AT_ONCE", "KEEP_ALIVE"):
        monkeypatch.setattr(http, name, 60.0)
    sink.behave(last_words())
    sent = [message() for _ in range(50)]
    async with opened(HttpTransport(sink.url, concurrency=1)) as transport:
        found = await transport.publish(sent)
    assert (len(found.confirmed), found.refused) == (50, {})
    assert sink.ids == [each.id for each in sent]


async def test_a_server_that_closes_every_connection_is_asked_twice_and_no_more(
    sink: HttpSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AT_ONCE", "KEEP_ALIVE"):
        monkeypatch.setattr(http, name, 60.0)
    async with opened(HttpTransport(sink.url)) as transport:
        assert (await transport.publish([message()])).confirmed
        sink.behave(close())
        found = await transport.publish([message()])
    assert (found.confirmed, found.refused) == (frozenset(), {})
    assert len(sink.requests) == 3


async def test_an_answer_that_nobody_asked_for_is_not_taken_for_the_next_one(
    sink: HttpSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AT_ONCE", "KEEP_ALIVE"):
        monkeypatch.setattr(http, name, 60.0)
    more = asyncio.Event()

    async def twice(request: Request, connection: Connection) -> bool:
        await connection.send(answer(200))
        await more.wait()
        await connection.send(answer(200))
        return True

    sink.behave(twice, times=1)
    sink.behave(status(400))
    async with opened(HttpTransport(sink.url)) as transport:
        assert (await transport.publish([message()])).confirmed
        [kept] = [protocol for each in transport._client._connector._conns.values() for protocol, _ in each]
        more.set()
        async with asyncio.timeout(LONG):
            while not kept.should_close:
                await asyncio.sleep(0.01)
        sent = message()
        found = await transport.publish([sent])
    assert found.refused[sent.id].permanent


async def test_a_connection_over_which_a_body_still_goes_out_is_not_used_again() -> None:
    writers: list[asyncio.StreamWriter] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """By the headers alone; nobody reads the rest."""
        writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(413))

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server, opened(HttpTransport(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")) as transport:
        for count in (1, 2):
            sent = message(body=b"1" * 64 * 2**20)
            assert (await transport.publish([sent])).refused[sent.id].permanent
            assert len(writers) == count
        for writer in writers:
            writer.transport.abort()  # from Python 3.12 on a server that closes waits for its connections


@asynccontextmanager
async def answering_early(then: Callable[[Connection], Awaitable[None]], **options: Any) -> AsyncIterator[int]:
    """The port of a server that says 200 as soon as it has the headers."""
    stopped = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(200))
        await then(Connection(reader, writer, stopped))
        writer.transport.abort()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, **options) as server:
        yield server.sockets[0].getsockname()[1]
        stopped.set()


def large_message() -> Message:
    return message(body=b"1" * 16 * 2**20, content_type="text/plain")


async def never_reads(connection: Connection) -> None:
    await connection.stopped.wait()


async def leaves(connection: Connection) -> None: ...


async def test_an_answer_before_everything_has_gone_out_counts_once_it_has() -> None:
    async def reads(connection: Connection) -> None:
        with suppress(OSError):
            while received[-1:] != b"}" and (piece := await connection.reader.read(2**20)):
                received.extend(piece)
        read.set()
        await connection.stopped.wait()

    sent, received, read = large_message(), bytearray(), asyncio.Event()
    async with answering_early(reads) as port, opened(HttpTransport(f"http://127.0.0.1:{port}")) as transport:
        assert (await transport.publish([sent])).confirmed == {sent.id}
        async with asyncio.timeout(LONG):
            await read.wait()
    assert len(received) > len(sent.body)


@pytest.mark.parametrize("then", [never_reads, leaves])
async def test_nobody_has_taken_what_was_not_sent(then: Callable[[Connection], Awaitable[None]]) -> None:
    async with (
        answering_early(then) as port,
        opened(HttpTransport(f"http://127.0.0.1:{port}", timeout=SHORT)) as transport,
    ):
        found = await transport.publish([large_message()])
    assert (found.confirmed, found.refused) == (frozenset(), {})


# What is sent.


async def test_a_request_is_signed_anew_with_the_same_id(sink: HttpSink) -> None:
    sink.behave(status(503), times=1)
    secrets = Secrets(bytes(24), bytes(32))
    sent = message()
    async with opened(HttpTransport(sink.url, secrets=secrets)) as transport:
        for _ in range(2):
            await transport.publish([sent])
    for request in sink.requests:
        timestamp = int(request.headers["webhook-timestamp"])
        assert verify(secrets, request.headers, request.body, timestamp) == sent.id
    assert len({request.headers["webhook-id"] for request in sink.requests}) == 1


async def test_without_a_secret_nothing_is_signed(sink: HttpSink) -> None:
    await published(sink)
    assert not [name for name in sink.requests[0].headers if name.startswith("webhook-")]


async def test_settings_fill_in_what_was_not_given(sink: HttpSink) -> None:
    defaults = Defaults(settings={"source": "/from/settings", "webhook_secrets": Secrets(bytes(24))})
    for options, source, signed in (
        ({}, "/from/settings", True),
        ({"source": "/own", "secrets": ()}, "/own", False),
    ):
        transport = HttpTransport(sink.url, **options)  # type: ignore[arg-type]
        transport.adopt(defaults)
        async with opened(transport):
            await transport.publish([message()])
        assert sink.requests[-1].json["source"] == source
        assert ("webhook-signature" in sink.requests[-1].headers) == signed


async def test_user_password_and_headers_travel_and_the_path_stays(sink: HttpSink) -> None:
    url = sink.url.replace("//", "//user:p%40ss@") + "/a%20b/c?token=x%2By#fragment"
    async with opened(HttpTransport(url, headers={"X-Api-Key": "k"})) as transport:
        await transport.publish([message()])
    [request] = sink.requests
    assert request.method == "POST"
    assert request.path == "/a%20b/c?token=x%2By"
    assert request.headers["authorization"] == "Basic dXNlcjpwQHNz"
    assert request.headers["x-api-key"] == "k"
    assert request.headers["user-agent"] == "transactional-outbox"
    assert "cookie" not in request.headers


async def test_cookies_are_not_kept(sink: HttpSink) -> None:
    sink.behave(status(200, {"set-cookie": "session=1; Path=/"}))
    async with opened(HttpTransport(sink.url)) as transport:
        for _ in range(2):
            await transport.publish([message()])
    assert not [request for request in sink.requests if "cookie" in request.headers]


async def test_no_proxy_is_taken_from_the_environment(sink: HttpSink, monkeypatch: pytest.MonkeyPatch) -> None:
    async with HttpSink() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        assert (await published(sink)).confirmed
        assert proxy.connections == 0


async def test_a_message_that_cannot_be_written_takes_no_other_with_it(
    sink: HttpSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, fine = message(), message()

    def write(each: Message, source: str) -> tuple[dict[str, str], bytes]:
        if each is broken:
            raise RuntimeError("no way")
        return {}, each.body

    transport = HttpTransport(sink.url)
    monkeypatch.setattr(transport, "_write", write)
    async with opened(transport):
        found = await transport.publish([broken, fine])
    assert found.confirmed == {fine.id}
    assert "no way" in found.refused[broken.id].error
    assert found.refused[broken.id].permanent


async def test_a_message_that_cannot_be_written_is_no_answer_of_its_destination(sink: HttpSink) -> None:
    broken = message(content_type="text/kr\u00e4ftig")
    told: list[Published] = []
    async with opened(HttpTransport(sink.url, mode="binary")) as transport:
        found = await transport.publish([broken], told.append)
    assert [(each.answered, [*each.refused]) for each in told] == [(False, [broken.id])]
    assert (found.answered, found.asked, found.refused[broken.id].permanent) == (False, False, True)
    assert sink.connections == 0


@pytest.mark.parametrize("content_type", ["text/plain\r\nx-admin: yes", "text/plain\x00", "text/kr\u00e4ftig"])
async def test_nothing_in_a_message_becomes_a_header_of_its_own(sink: HttpSink, content_type: str) -> None:
    broken, fine = message(content_type=content_type), message()
    async with opened(HttpTransport(sink.url, mode="binary")) as transport:
        found = await transport.publish([broken, fine])
    assert (found.confirmed, [*found.refused]) == ({fine.id}, [broken.id])
    assert sink.ids == [fine.id]


# TLS.


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls", numbered=True)
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)  # whoever makes them may enter it
    make_certificates(folder / "ours", host="localhost")
    return folder / "ours"


@pytest.fixture
async def secure(certificates: Path) -> AsyncIterator[HttpSink]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates / "certificate.pem", certificates / "key.pem")
    async with HttpSink(ssl_context=context) as sink:
        yield sink


async def test_what_tls_has_encrypted_has_not_gone_out_yet(certificates: Path) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates / "certificate.pem", certificates / "key.pem")
    trusting = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    async with answering_early(never_reads, ssl=context) as port:
        url = f"https://localhost:{port}"
        async with opened(HttpTransport(url, timeout=SHORT, ssl_context=trusting)) as transport:
            found = await transport.publish([large_message()])
    assert (found.confirmed, found.refused) == (frozenset(), {})


async def test_a_certificate_has_to_be_trusted_and_for_that_host(secure: HttpSink, certificates: Path) -> None:
    trusting = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    by_name = secure.url.replace("127.0.0.1", "localhost")
    sent = message()
    for url, context, taken in (
        (by_name, trusting, {sent.id}),
        (by_name, None, set()),
        (secure.url, trusting, set()),
    ):
        async with opened(HttpTransport(url, ssl_context=context)) as transport:
            found = await transport.publish([sent])
        assert (found.confirmed, found.refused) == (taken, {})
    assert len(secure.requests) == 1
