"""A relay and a transport that answers in every possible way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import ConfigurationError, Message, Outbox, TransportMismatch, listen
from outbox.core.events import Handled, Troubled
from outbox.core.transport import Published, Refusal
from outbox.outbound import publishing
from outbox.transports.memory import MemoryTransport
from tests.support.databases import either_feed
from tests.support.observing import PATIENCE, Recorder, eventually
from tests.support.outboxes import MakeOutbox, emit
from tests.walk.destinations import Answer, Scripted, broken, cancelled, nothing, unavailable, yes


def refuse(permanent: bool = False) -> Answer:
    def answer(messages: Sequence[Message]) -> Published:
        return Published(frozenset(), {message.id: Refusal("no thanks", permanent) for message in messages})

    return answer


async def drained(outbox: Outbox) -> None:
    async with asyncio.timeout(PATIENCE):
        while (await outbox.backlog()).waiting:
            await asyncio.sleep(0.02)


@asynccontextmanager
async def relaying(make_outbox: MakeOutbox, transport: Any, **options: Any) -> Any:
    outbox = make_outbox(transport=transport, **options)
    async with outbox.running(relay=True):
        yield outbox


@either_feed
async def test_a_confirmed_message_is_sent_once_and_gone(make_outbox: MakeOutbox) -> None:
    transport = Scripted(yes)
    async with relaying(make_outbox, transport) as outbox:
        await emit(outbox, 1, 2, 3)
        await drained(outbox)
    assert sorted(message.body for call in transport.calls for message in call) == [b"1", b"2", b"3"]


@either_feed
@pytest.mark.parametrize("doubt", [nothing, unavailable, broken, cancelled])
async def test_a_message_in_doubt_stays_and_burns_no_attempt(make_outbox: MakeOutbox, doubt: Answer) -> None:
    transport = Scripted(doubt, doubt, doubt, yes)
    async with relaying(make_outbox, transport, relay_retry_delays=()) as outbox:
        await emit(outbox, 1)
        await transport.until(4)
        await drained(outbox)
    assert len({call[0].id for call in transport.calls}) == 1
    assert await outbox.store.dead_letters.list() == []


@either_feed
async def test_of_a_batch_only_the_confirmed_are_done(make_outbox: MakeOutbox) -> None:
    def every_other(messages: Sequence[Message]) -> Published:
        return Published(frozenset(message.id for message in messages[::2]))

    transport = Scripted(every_other, yes)
    async with relaying(make_outbox, transport) as outbox:
        await emit(outbox, *range(10))
        await drained(outbox)
    sent = [message.id for call in transport.calls for message in call]
    assert len(set(sent)) == 10
    assert len(sent) == 15


@either_feed
async def test_a_refused_message_is_tried_again_by_the_relays_delays_and_then_dead(make_outbox: MakeOutbox) -> None:
    transport = Scripted(refuse())
    async with relaying(make_outbox, transport, relay_retry_delays=(0.05, 0.05)) as outbox:
        await emit(outbox, 1)
        await drained(outbox)
    assert len(transport.calls) == 3
    [letter] = await outbox.store.dead_letters.list()
    assert (letter.reason, letter.error, letter.attempt_count, letter.queue) == ("exhausted", "no thanks", 3, None)


@either_feed
async def test_what_the_destination_never_takes_is_dead_at_once(make_outbox: MakeOutbox) -> None:
    transport = Scripted(refuse(permanent=True))
    async with relaying(make_outbox, transport) as outbox:
        await emit(outbox, 1)
        await drained(outbox)
    assert len(transport.calls) == 1
    [letter] = await outbox.store.dead_letters.list()
    assert (letter.reason, letter.message.body) == ("refused", b"1")


@either_feed
async def test_a_refused_message_does_not_hold_up_the_others(make_outbox: MakeOutbox) -> None:
    def refuse_one(messages: Sequence[Message]) -> Published:
        bad = {message.id: Refusal("bad") for message in messages if message.body == b"0"}
        return Published(frozenset(message.id for message in messages) - bad.keys(), bad)

    transport = Scripted(refuse_one)
    async with relaying(make_outbox, transport, relay_retry_delays=(60,), batch_size=2) as outbox:
        await emit(outbox, *range(6))
        async with asyncio.timeout(PATIENCE):
            while (await outbox.backlog()).waiting > 1:
                await asyncio.sleep(0.02)
    [stored] = await outbox.messages()
    assert stored.message.body == b"0"
    assert "bad" in stored.history


@either_feed
async def test_a_publish_without_an_answer_ends_at_the_deadline(
    make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "DEADLINE", 0.1)

    async def silent(messages: Sequence[Message]) -> Published:
        await asyncio.sleep(3600)
        raise AssertionError

    transport = Scripted(silent, yes)
    async with relaying(make_outbox, transport) as outbox:
        await emit(outbox, 1)
        await transport.until(2)
        await drained(outbox)
    assert transport.calls[0] == transport.calls[1]


@either_feed
async def test_a_function_is_a_transport_raising_means_not_sent(make_outbox: MakeOutbox) -> None:
    sent: list[bytes] = []
    failures = iter([True, False])

    async def publish(message: Message) -> None:
        if next(failures, False):
            raise ConnectionError("away")
        sent.append(message.body)

    async with relaying(make_outbox, publish, relay_retry_delays=(0.01,)) as outbox:
        await emit(outbox, 1)
        await drained(outbox)
    assert sent == [b"1"]


async def test_a_worker_on_a_function_is_refused(make_outbox: MakeOutbox) -> None:
    async def publish(message: Message) -> None: ...

    @listen("#", queue="q")
    async def listener(body: object) -> None: ...

    with pytest.raises(ConfigurationError, match="only publishes"):
        async with make_outbox(transport=publish).running(listeners=[listener]):
            pass


async def test_another_transport_on_the_same_table_is_refused_by_name(make_outbox: MakeOutbox) -> None:
    @listen("#", queue="q")
    async def listener(body: object) -> None: ...

    async with make_outbox(transport=Scripted(yes)).running(relay=True):
        pass
    with pytest.raises(TransportMismatch, match=r"'scripted'.*'database'.*switch-transport database"):
        async with make_outbox().running(listeners=[listener]):
            pass


@either_feed
async def test_relay_and_worker_share_a_transport_in_one_process(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox(transport=MemoryTransport())
    handled: asyncio.Queue[int] = asyncio.Queue()

    @listen("order.*", queue="q")
    async def listener(body: int, session: AsyncSession) -> None:
        await handled.put(body)

    async with outbox.running(relay=True, listeners=[listener]):
        await emit(outbox, 1, 2, 3)
        async with asyncio.timeout(PATIENCE):
            assert sorted([await handled.get() for _ in range(3)]) == [1, 2, 3]


async def test_a_duplicate_from_the_transport_has_no_second_effect_in_the_session(make_outbox: MakeOutbox) -> None:
    """The inbox: the transport delivers twice, the listener's transaction commits once."""
    transport = MemoryTransport()
    outbox = make_outbox(transport=transport)
    runs: list[int] = []
    copies = asyncio.Event()

    @listen("order.*", queue="q", concurrency=1)
    async def listener(body: int, session: AsyncSession) -> None:
        runs.append(body)

    @listen("order.*", queue="after")
    async def after(body: int) -> None:
        copies.set()

    message = Message(routing_key="order.created", body=b"1")
    async with outbox.running(listeners=[listener, after]):
        for _ in range(3):
            await transport.publish([message])
        async with asyncio.timeout(PATIENCE):
            await copies.wait()
            while transport.waiting("q"):
                await asyncio.sleep(0.01)
    assert runs == [1]


async def test_while_the_inbox_takes_no_entry_no_listener_is_called_and_no_attempt_burned(
    make_outbox: MakeOutbox,
) -> None:
    transport, watch = MemoryTransport(), Recorder()
    outbox = make_outbox(transport=transport, observers=[watch])
    handled: asyncio.Queue[int] = asyncio.Queue()

    @listen("order.*", queue="q", retry_delays=[0.01])
    async def listener(body: int, attempt_count: int, session: AsyncSession) -> None:
        await handled.put(attempt_count)

    await outbox.create_tables()
    inbox = outbox.tables.inbox.name
    await execute(outbox, f"ALTER TABLE {inbox} RENAME TO {inbox}_away")
    async with outbox.running(listeners=[listener]):
        await transport.publish([Message(routing_key="order.created", body=b"1")])
        await eventually(
            lambda: any(told.where == "session for q" for told in watch.of(Troubled)) or bool(watch.of(Handled))
        )
        assert not watch.of(Handled) and handled.empty()
        await execute(outbox, f"ALTER TABLE {inbox}_away RENAME TO {inbox}")
        async with asyncio.timeout(PATIENCE):
            assert await handled.get() == 1


async def execute(outbox: Outbox, statement: str) -> None:
    async with outbox.engines.asynchronous.begin() as connection:
        await connection.execute(text(statement))
