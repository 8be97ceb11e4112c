"""The doorway does what it says to requests, and remembers what relays were told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from outbox.core.message import Message
from outbox.core.transport import Published
from outbox.core.webhooks import Secrets
from outbox.transports.http import HttpTransport
from tests.chaos.doorway import NO_ANSWER, SECRET, TAKEN, Doorway, HttpLink
from tests.chaos.fates import UNANSWERED

SOON = 30.0  # seconds


class Behind:
    """An application that takes everything."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self._serving: set[asyncio.Task[None]] = set()

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.add(asyncio.create_task(self._serve(reader, writer)))

    async def close(self) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.bodies.append(await reader.readexactly(length))
                writer.write(b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n")
        except (OSError, asyncio.IncompleteReadError):
            pass  # whoever asked has left
        finally:
            writer.transport.abort()


@pytest.fixture
def doorway() -> Iterator[Doorway]:
    with Doorway() as doorway:
        yield doorway


@pytest.fixture
async def behind(doorway: Doorway) -> AsyncIterator[Behind]:
    behind = Behind()
    async with await asyncio.start_unix_server(behind.connected, doorway.socket):
        yield behind
        await behind.close()


@pytest.fixture
def link(doorway: Doorway) -> HttpLink:
    return doorway.link("relay-0.1")


@pytest.fixture
async def relay(link: HttpLink) -> AsyncIterator[HttpTransport]:
    transport = HttpTransport(f"http://127.0.0.1:{link.port}/", secrets=Secrets(SECRET))
    await transport.open()
    yield transport
    await transport.close()


async def sent(relay: HttpTransport, id: str, body: bytes = b"{}") -> Published:
    async with asyncio.timeout(SOON):
        return await relay.publish([Message(routing_key="order.placed", body=body, tracking_ids=(id,))])


def told(doorway: Doorway) -> list[tuple[str, str, int | None]]:
    return [(each.relay, each.message_id, each.status) for each in doorway.asked()]


async def noted(doorway: Doorway, count: int) -> None:
    """An answer is noted after it was passed on."""
    async with asyncio.timeout(SOON):
        while len(doorway.asked()) < count:
            await asyncio.sleep(0.01)


async def test_what_is_let_in_arrives_and_its_answer_comes_back(
    doorway: Doorway, behind: Behind, relay: HttpTransport
) -> None:
    for id in ("one", "two"):
        assert (await sent(relay, id)).confirmed == {id}
    assert len(behind.bodies) == 2
    await noted(doorway, 2)
    assert told(doorway) == [("relay-0.1", "one", 202), ("relay-0.1", "two", 202)]


async def test_who_is_turned_away_hears_the_status_and_nobody_behind_hears_anything(
    doorway: Doorway, behind: Behind, link: HttpLink, relay: HttpTransport
) -> None:
    link.turn_away(503)
    assert set((await sent(relay, "one")).refused) == {"one"}
    await noted(doorway, 1)
    assert (told(doorway), behind.bodies) == ([("relay-0.1", "one", 503)], [])
    link.heal()
    assert (await sent(relay, "one")).confirmed


async def test_a_reset_is_no_answer(doorway: Doorway, behind: Behind, link: HttpLink, relay: HttpTransport) -> None:
    link.turn_away(NO_ANSWER)
    published = await sent(relay, "one")
    assert not published.confirmed
    assert not published.refused
    assert {status for _, _, status in told(doorway)} == {None}
    assert not behind.bodies


async def test_a_message_with_that_fate_hangs_alone_and_once(
    doorway: Doorway, behind: Behind, relay: HttpTransport
) -> None:
    body = f'{{"fate": "{UNANSWERED}"}}'.encode()
    hanging = asyncio.create_task(sent(relay, "one", body))
    async with asyncio.timeout(SOON):
        while not doorway.hanging:
            await asyncio.sleep(0.01)
    assert (await sent(relay, "two")).confirmed
    doorway.answer_everything()
    assert not (await hanging).confirmed
    assert (await sent(relay, "one", body)).confirmed
    await noted(doorway, 3)
    assert told(doorway) == [("relay-0.1", "two", 202), ("relay-0.1", "one", None), ("relay-0.1", "one", 202)]
    assert len(behind.bodies) == 2


async def test_whom_nobody_listens_to_leaves_no_request(
    doorway: Doorway, behind: Behind, link: HttpLink, relay: HttpTransport
) -> None:
    link.leave()
    async with asyncio.timeout(SOON):
        while "Cannot connect" not in (await sent(relay, "one")).silence:
            link.asked.clear()  # it was not gone yet
    assert not told(doorway)
    await asyncio.to_thread(link.come_back)
    assert (await sent(relay, "one")).confirmed


async def test_what_is_taken_and_cut_off_arrived_and_nobody_heard_of_it(
    doorway: Doorway, behind: Behind, link: HttpLink, relay: HttpTransport
) -> None:
    link.trip_at([TAKEN])
    published = await sent(relay, "one")
    assert not published.confirmed
    assert link.tripped.is_set()
    assert (told(doorway), len(behind.bodies)) == ([("relay-0.1", "one", None)], 1)
    assert (await sent(relay, "one")).confirmed


async def test_silence_ends_in_a_reset_and_what_was_swallowed_is_gone(
    doorway: Doorway, behind: Behind, link: HttpLink, relay: HttpTransport
) -> None:
    link.swallow()
    sending = asyncio.create_task(sent(relay, "one"))
    async with asyncio.timeout(SOON):
        while not link.connections:
            await asyncio.sleep(0.01)
    link.heal()
    published = await sending
    assert not published.confirmed
    assert not published.refused
    assert not behind.bodies
    assert (await sent(relay, "one")).confirmed
