"""Over RabbitMQ: "Worker process", "Tracking IDs", "Topic exchange and wildcard matching", "Listener arguments",
"Automatic (de)serialization of Pydantic models", "CPU-bound work", and the API of `listen()` and `Listener`.

The rulings: `message` without annotation is aio-pika's object, and a body that is no JSON comes as bytes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import zlib
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

import outbox as library
from outbox import Listener, Message, Outbox, get_tracking_ids, listen
from outbox.core.events import Handled
from tests.support.broker import VirtualHost
from tests.support.databases import on_both_stores, on_sqlite
from tests.support.observing import Recorder, arrival, eventually
from tests.support.outboxes import MakeOutbox
from tests.support.queues import bring_back, taken

from .users import JOHN, Arrivals, User, emit_and_commit

# Worker process


@on_both_stores
async def test_a_decorated_function_and_a_listener_made_by_hand_get_what_was_emitted(
    rabbitmq_outbox: Outbox, arrivals: Arrivals, vhost: VirtualHost
) -> None:
    @listen("user.created", retry_delays=())
    async def on_user_created(user):  # type: ignore[no-untyped-def]
        arrivals.put_nowait(("decorated", user))

    async def by_hand(user):  # type: ignore[no-untyped-def]
        arrivals.put_nowait(("by hand", user))

    handlers = [
        on_user_created,
        Listener(
            binding_key="user.created",
            callback=by_hand,
            queue="analytics_service.on_user_created",  # optional, auto-generated if not provided
            retry_delays=(),
        ),
    ]
    async with rabbitmq_outbox.running(relay=True, listeners=handlers):
        await emit_and_commit(rabbitmq_outbox, "user.created", {"id": 123, "username": "johndoe"})
        found = dict([await arrival(arrivals), await arrival(arrivals)])
    assert found == {"decorated": JOHN, "by hand": JOHN}
    named = f"{__name__}.test_a_decorated_function_and_a_listener_made_by_hand_get_what_was_emitted.on_user_created"
    assert vhost.queues().keys() == {
        named,
        f"{named}.dlq",
        "analytics_service.on_user_created",
        "analytics_service.on_user_created.dlq",
    }


def test_a_listener_holds_nothing_of_the_worker_that_runs_it() -> None:
    """The ruling: no `queue_obj` and no `consumer_tag`, so that one declaration can serve many workers."""
    fields = {each.name for each in dataclasses.fields(Listener)}
    assert fields >= {"binding_key", "callback", "queue", "retry_delays"}
    assert not fields & {"queue_obj", "consumer_tag"}
    listener = Listener("user.created", print, queue="users")
    with pytest.raises(dataclasses.FrozenInstanceError):
        listener.queue = "another"  # type: ignore[misc]


@on_sqlite
async def test_several_workers_share_a_queue(
    make_rabbitmq_outbox: MakeOutbox, rabbitmq_url: str, arrivals: Arrivals, recorder: Recorder
) -> None:
    @listen("user.created", queue="shared", concurrency=1, retry_delays=())
    async def shared(number: int) -> None:
        arrivals.put_nowait(number)
        await asyncio.sleep(0)

    producer = make_rabbitmq_outbox()
    others = [Outbox(rabbitmq_url=rabbitmq_url, observers=[recorder]) for _ in range(2)]
    async with (
        producer.running(relay=True),
        others[0].running(listeners=[shared]),
        others[1].running(listeners=[shared]),
    ):
        async with producer.transaction() as session:
            await producer.emit_many(session, "user.created", range(40))
        found = [await arrival(arrivals) for _ in range(40)]
        await recorder.wait_for(Handled, 40)
    assert sorted(found) == list(range(40))
    assert arrivals.empty()


# Tracking IDs


@pytest.fixture
def seen() -> dict[str, tuple[str, ...]]:
    return {}


@pytest.fixture
def chain(db_engine: AsyncEngine, seen: dict[str, tuple[str, ...]]) -> list[Listener]:
    """The project's three listeners, the first of which emits for the others."""

    async def on_user_created(user: Any, tracking_ids: tuple[str, ...]) -> None:
        assert get_tracking_ids() == tracking_ids
        seen["created"] = tracking_ids
        async with AsyncSession(db_engine) as session:
            await library.emit(session, "user.welcome_email", {"id": user["id"]})
            await library.emit(session, "user.created_notification", {"id": user["id"]})
            await session.commit()

    async def on_user_welcome_email(user: Any, tracking_ids: tuple[str, ...]) -> None:
        seen["email"] = tracking_ids

    async def on_user_created_notification(user, tracking_ids):  # type: ignore[no-untyped-def]
        seen["notification"] = tracking_ids

    return [
        listen("user.created", queue="created", retry_delays=())(on_user_created),
        listen("user.welcome_email", queue="email", retry_delays=())(on_user_welcome_email),
        listen("user.created_notification", queue="notification", retry_delays=())(on_user_created_notification),
    ]


@on_both_stores
async def test_each_emit_appends_a_uuid_to_what_led_to_it_and_tracking_one_for_the_entry_point(
    db_engine: AsyncEngine,
    singleton: Outbox,
    table_name: str,
    rabbitmq_url: str,
    chain: list[Listener],
    seen: dict[str, tuple[str, ...]],
) -> None:
    library.setup(db_engine=db_engine, table_name=table_name, rabbitmq_url=rabbitmq_url, poll_interval=0.2)

    async def entrypoint() -> None:
        async with AsyncSession(db_engine) as session:
            await library.emit(session, "user.created", {"id": 123, "username": "johndoe"})
            await session.commit()

    async with library.running(relay=True, listeners=chain):
        await entrypoint()
        await eventually(lambda: len(seen) == 3)
        [uuid1] = seen["created"]
        assert seen["email"][:-1] == seen["notification"][:-1] == (uuid1,)
        assert len({uuid1, seen["email"][-1], seen["notification"][-1]}) == 3
        seen.clear()
        with library.tracking():
            [own] = get_tracking_ids()
            await entrypoint()
        await eventually(lambda: len(seen) == 3)
    assert len(seen["created"]) == 2
    assert seen["created"][0] == own
    assert seen["email"][:-1] == seen["notification"][:-1] == seen["created"]
    assert len({*seen["created"], seen["email"][-1], seen["notification"][-1]}) == 4


# Topic exchange and wildcard matching


@on_both_stores
async def test_wildcards_match_by_the_rules_of_a_topic_exchange(rabbitmq_outbox: Outbox, recorder: Recorder) -> None:
    routing_keys = ["user", "user.created", "user.deleted", "user.created.late", "order.created"]
    expected = {
        "user.*": ["user.created", "user.deleted"],
        "user.#": ["user", "user.created", "user.created.late", "user.deleted"],
        "*.created": ["order.created", "user.created"],
        "#": sorted(routing_keys),
        "user.created": ["user.created"],
    }
    received: dict[str, list[str]] = {}

    def listener(binding_key: str, number: int) -> Listener:
        async def on_event(routing_key: str, body: object) -> None:
            assert body == JOHN
            received.setdefault(binding_key, []).append(routing_key)

        return Listener(binding_key, on_event, queue=f"number {number}", retry_delays=())

    listeners = [listener(binding_key, number) for number, binding_key in enumerate(expected)]
    async with rabbitmq_outbox.running(relay=True, listeners=listeners):
        async with rabbitmq_outbox.transaction() as session:
            for routing_key in routing_keys:
                await rabbitmq_outbox.emit(session, routing_key, JOHN)
        await recorder.wait_for(Handled, sum(len(keys) for keys in expected.values()))
    assert {binding_key: sorted(keys) for binding_key, keys in received.items()} == expected


# Listener arguments


@on_both_stores
async def test_the_five_arguments_are_filled_by_their_names_at_every_attempt(
    rabbitmq_outbox: Outbox, arrivals: Arrivals
) -> None:
    @listen("user.*", retry_delays=(0.05, 0))
    async def on_user_event(
        routing_key: str,
        message: aio_pika.IncomingMessage,
        tracking_ids: tuple[str, ...],
        queue_name: str,
        attempt_count: int,
        user: User,
        ours: Message,
    ) -> None:
        arrivals.put_nowait((routing_key, message, tracking_ids, queue_name, attempt_count, user, ours))
        if attempt_count < 3:
            raise ConnectionError

    async with rabbitmq_outbox.running(relay=True, listeners=[on_user_event]):
        emitted = await emit_and_commit(rabbitmq_outbox, "user.created", User(**JOHN), headers={"tenant": "Ätna"})
        for number in (1, 2, 3):
            routing_key, message, tracking_ids, queue_name, attempt_count, user, ours = await arrival(arrivals)
            assert (routing_key, attempt_count) == ("user.created", number)
            assert tracking_ids == emitted.tracking_ids
            assert queue_name == on_user_event.queue
            assert user == User(id=123, username="johndoe")
            assert isinstance(message, aio_pika.IncomingMessage)
            assert (message.body, message.message_id) == (b'{"id":123,"username":"johndoe"}', emitted.id)
            assert (message.content_type, message.headers["tenant"]) == ("application/json", "Ätna")
            assert message.routing_key == ("user.created" if number == 1 else on_user_event.queue)
            assert ours == emitted


@on_sqlite
async def test_a_body_becomes_what_its_annotation_says(
    rabbitmq_outbox: Outbox, arrivals: Arrivals, channel: AbstractChannel
) -> None:
    async def plain(body):  # type: ignore[no-untyped-def]
        arrivals.put_nowait(("plain", body))

    async def as_bytes(body: bytes) -> None:
        arrivals.put_nowait(("bytes", body))

    async def as_user(body: User) -> None:
        arrivals.put_nowait(("user", body))

    callbacks = {"plain": plain, "bytes": as_bytes, "user": as_user}
    listeners = [Listener("#", callback, queue=queue, retry_delays=()) for queue, callback in callbacks.items()]
    async with rabbitmq_outbox.running(relay=True, listeners=listeners):
        await emit_and_commit(rabbitmq_outbox, "user.created", User(id=123, username="johndoe"))
        found = dict([await arrival(arrivals) for _ in listeners])
        assert found == {
            "plain": JOHN,
            "bytes": b'{"id":123,"username":"johndoe"}',
            "user": User(id=123, username="johndoe"),
        }
        await emit_and_commit(rabbitmq_outbox, "user.created", b"\xff no JSON")
        assert dict([await arrival(arrivals) for _ in range(2)]) == {
            "plain": b"\xff no JSON",
            "bytes": b"\xff no JSON",
        }
        letter = await taken(channel, "user.dlq")  # what is no user is no user next time either
        assert (letter.body, letter.headers["outbox-reason"]) == (b"\xff no JSON", "undecodable")
    assert arrivals.empty()


@on_both_stores
async def test_a_duplicate_of_the_broker_has_no_second_effect_for_whoever_asks_for_the_session(
    rabbitmq_outbox: Outbox, db_engine: AsyncEngine, user_model: Any, recorder: Recorder, channel: AbstractChannel
) -> None:
    """The project asks for idempotent handlers; this is the one that needs no care of its own."""
    calls: list[int] = []

    @listen("user.created", queue="users", retry_delays=())
    async def on_user_created(user: User, session: AsyncSession) -> None:
        calls.append(user.id)
        session.add(user_model(id=len(calls), username=user.username))

    async with rabbitmq_outbox.running(listeners=[on_user_created]):
        pass
    async with rabbitmq_outbox.running(relay=True):
        await emit_and_commit(rabbitmq_outbox, "user.created")
        message = await taken(channel, "users")
    async with rabbitmq_outbox.running(listeners=[on_user_created]):
        for _ in range(3):
            await bring_back(channel, message, exchange="outbox")
        await recorder.wait_for(Handled, 3)
    assert calls == [123]
    async with AsyncSession(db_engine) as session:
        assert await session.scalar(select(func.count()).select_from(user_model)) == 1


# CPU-bound work


@on_sqlite
async def test_cpu_bound_work_can_be_handed_to_a_process_pool(rabbitmq_outbox: Outbox, arrivals: Arrivals) -> None:
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as process_pool:

        @listen("image.uploaded", queue="thumbnails", retry_delays=())
        async def process_image(image_data: bytes) -> None:
            loop = asyncio.get_event_loop()
            processed_data = await loop.run_in_executor(process_pool, zlib.compress, image_data)
            arrivals.put_nowait(processed_data)

        async with rabbitmq_outbox.running(relay=True, listeners=[process_image]):
            await emit_and_commit(rabbitmq_outbox, "image.uploaded", b"pixel" * 1000)
            assert zlib.decompress(await arrival(arrivals)) == b"pixel" * 1000
