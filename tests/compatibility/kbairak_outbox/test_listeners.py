""" "Worker process", "Tracking IDs", "Topic exchange and wildcard matching", "Listener arguments", "Automatic
(de)serialization of Pydantic models", "CPU-bound work", and the API of `listen()`, `Listener` and `worker()`.
"""

from __future__ import annotations

import asyncio
import datetime
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

import outbox as library
from outbox import ConfigurationError, Listener, Message, Outbox, get_tracking_ids, listen, tracking
from outbox.core.events import Handled
from tests.support.databases import on_every_driver, on_sqlite
from tests.support.observing import Recorder, arrival, eventually
from tests.support.outboxes import MakeOutbox

from .users import JOHN, User, emit_and_commit


@listen("user.created")
async def on_user_created(user: object) -> object:
    return user


# Worker process


async def test_a_decorated_function_is_handed_what_was_emitted(outbox: Outbox) -> None:
    arrivals: asyncio.Queue[object] = asyncio.Queue()

    @listen("user.created")
    async def on_user_created(user):  # type: ignore[no-untyped-def]
        await arrivals.put(user)

    async with outbox.running(listeners=[on_user_created]):
        await emit_and_commit(outbox, "user.created", {"id": 123, "username": "johndoe"})
        assert await arrival(arrivals) == {"id": 123, "username": "johndoe"}


@on_sqlite
async def test_a_listener_made_by_hand_is_handed_what_was_emitted(outbox: Outbox) -> None:
    arrivals: asyncio.Queue[object] = asyncio.Queue()

    async def on_user_created(user):  # type: ignore[no-untyped-def]
        await arrivals.put(user)

    handlers = [
        Listener(
            binding_key="user.created",
            callback=on_user_created,
            queue="analytics_service.on_user_created",  # optional, auto-generated if not provided
        )
    ]
    async with outbox.running(listeners=handlers):
        await emit_and_commit(outbox, "user.created", JOHN)
        assert await arrival(arrivals) == JOHN
    [binding] = await outbox.bindings()
    assert (binding.queue, binding.binding_key) == ("analytics_service.on_user_created", "user.created")


def test_the_decorator_and_the_class_are_equivalent() -> None:
    async def callback(user: object) -> None: ...

    options: dict[str, Any] = {"queue": "q", "retry_delays": (1, 2), "concurrency": 3, "timeout": 4, "lease": 5}
    assert Listener("binding_key", callback, **options) == listen("binding_key", **options)(callback)
    assert Listener("binding_key", callback) == listen("binding_key")(callback)


async def test_a_listener_is_callable_as_the_function_it_was() -> None:
    assert await on_user_created(JOHN) == JOHN
    assert await on_user_created(user=JOHN) == JOHN


def test_a_queue_without_a_name_is_named_after_module_and_function() -> None:
    assert on_user_created.queue == f"{__name__}.on_user_created"
    assert listen("user.created", queue="")(on_user_created.callback).queue == f"{__name__}.on_user_created"


def test_a_listener_keeps_what_it_was_declared_with() -> None:
    assert (on_user_created.binding_key, on_user_created.retry_delays) == ("user.created", None)
    assert listen("user.created", retry_delays=(5, 30))(on_user_created.callback).retry_delays == (5, 30)


@on_sqlite
async def test_one_listener_can_serve_several_workers(make_outbox: MakeOutbox) -> None:
    arrivals: asyncio.Queue[object] = asyncio.Queue()

    @listen("user.created", queue="shared")
    async def shared(user: object) -> None:
        await arrivals.put(user)

    first, second = make_outbox(), make_outbox()
    async with first.running(listeners=[shared]), second.running(listeners=[shared]):
        async with first.transaction() as session:
            await first.emit_many(session, "user.created", range(40))
        found = [await arrival(arrivals) for _ in range(40)]
    assert sorted(found) == list(range(40))  # type: ignore[type-var]
    assert arrivals.empty()


@on_sqlite
async def test_two_listeners_on_one_queue_are_refused(outbox: Outbox) -> None:
    with pytest.raises(ConfigurationError, match="share the queue"):
        async with outbox.running(listeners=[on_user_created, on_user_created]):
            pass


@on_sqlite
async def test_a_worker_without_listeners_is_refused(outbox: Outbox) -> None:
    with pytest.raises(ConfigurationError, match="at least one listener"):
        await outbox.worker([])


@on_sqlite
async def test_a_function_that_was_not_decorated_is_refused_with_advice(outbox: Outbox) -> None:
    with pytest.raises(ConfigurationError, match="@listen"):
        await outbox.worker([on_user_created.callback])  # type: ignore[list-item]


@on_sqlite
async def test_a_queue_named_after_main_is_warned_about(outbox: Outbox) -> None:
    async def on_user_created(user: object) -> None: ...

    on_user_created.__module__ = "__main__"
    with pytest.warns(UserWarning, match="__main__"):
        async with outbox.running(listeners=[listen("user.created")(on_user_created)]):
            pass


@on_sqlite
async def test_the_worker_starts_listeners_side_by_side(outbox: Outbox) -> None:
    together = asyncio.Barrier(3)
    arrivals: asyncio.Queue[object] = asyncio.Queue()

    @listen("user.created", queue="slow", concurrency=3)
    async def slow(user: object) -> None:
        await together.wait()
        await arrivals.put(user)

    async with outbox.running(listeners=[slow]):
        async with outbox.transaction() as session:
            await outbox.emit_many(session, "user.created", [1, 2, 3])
        assert {await arrival(arrivals) for _ in range(3)} == {1, 2, 3}


# Tracking IDs


@pytest.fixture
def seen() -> dict[str, tuple[str, ...]]:
    """Which tracking ids each listener of the chain was given."""
    return {}


@pytest.fixture
def chain(
    db_engine: AsyncEngine, singleton: Outbox, table_name: str, seen: dict[str, tuple[str, ...]]
) -> list[Listener]:
    """The listeners of the project's example, on the module-level outbox."""
    from outbox import emit

    singleton.setup(db_engine=db_engine, table_name=table_name, poll_interval=0.2)

    @listen("user.created", queue="created")
    async def on_user_created(user: User, tracking_ids: tuple[str, ...]) -> None:
        seen["created"] = tracking_ids
        async with AsyncSession(db_engine) as session:
            await emit(session, "user.welcome_email", {"id": user.id})
            await emit(session, "user.created_notification", {"id": user.id})
            await session.commit()

    @listen("user.welcome_email", queue="email")
    async def on_user_welcome_email(user: object, tracking_ids: tuple[str, ...]) -> None:
        seen["email"] = tracking_ids

    @listen("user.created_notification", queue="notification")
    async def on_user_created_notification(user, tracking_ids):  # type: ignore[no-untyped-def]
        seen["notification"] = tracking_ids

    return [on_user_created, on_user_welcome_email, on_user_created_notification]


async def test_each_emit_appends_a_uuid_to_what_led_to_it(
    db_engine: AsyncEngine, singleton: Outbox, chain: list[Listener], seen: dict[str, tuple[str, ...]]
) -> None:
    async with singleton.running(listeners=chain):
        async with AsyncSession(db_engine) as session:
            message = await library.emit(session, "user.created", {"id": 123, "username": "johndoe"})
            await session.commit()
        await eventually(lambda: len(seen) == 3)
    assert message is not None
    uuid1 = message.id
    assert seen["created"] == (uuid1,)
    assert seen["email"][:-1] == seen["notification"][:-1] == (uuid1,)
    uuid2, uuid3 = seen["email"][-1], seen["notification"][-1]
    assert len({uuid1, uuid2, uuid3}) == 3
    assert all(str(UUID(each)) == each for each in (uuid1, uuid2, uuid3))


async def test_tracking_gives_the_entry_point_a_uuid_of_its_own(
    db_engine: AsyncEngine, singleton: Outbox, chain: list[Listener], seen: dict[str, tuple[str, ...]]
) -> None:
    async with singleton.running(listeners=chain):
        with library.tracking():
            [uuid1] = get_tracking_ids()
            async with AsyncSession(db_engine) as session:
                await library.emit(session, "user.created", {"id": 123, "username": "johndoe"})
                await session.commit()
        await eventually(lambda: len(seen) == 3)
    assert len(seen["created"]) == 2
    assert seen["created"][0] == uuid1
    assert seen["email"][:-1] == seen["notification"][:-1] == seen["created"]
    assert len({*seen["created"], seen["email"][-1], seen["notification"][-1]}) == 4


@on_sqlite
async def test_get_tracking_ids_tells_a_listener_what_led_to_it(outbox: Outbox) -> None:
    arrivals: asyncio.Queue[tuple[tuple[str, ...], ...]] = asyncio.Queue()

    @listen("user.created", queue="asks")
    async def asks(user: object, tracking_ids: tuple[str, ...]) -> None:
        await asyncio.sleep(0)
        inside_a_task = await asyncio.create_task(_ids())
        await arrivals.put((tracking_ids, get_tracking_ids(), inside_a_task))

    async def _ids() -> tuple[str, ...]:
        return get_tracking_ids()

    async with outbox.running(listeners=[asks]):
        await emit_and_commit(outbox, "user.created", JOHN)
        first, second, third = await arrival(arrivals)
    assert first == second == third
    assert len(first) == 1
    assert get_tracking_ids() == ()


@on_sqlite
async def test_a_retry_keeps_the_tracking_ids(outbox: Outbox) -> None:
    arrivals: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()

    @listen("user.created", queue="fails once", retry_delays=(0,))
    async def fails_once(user: object, tracking_ids: tuple[str, ...], attempt_count: int) -> None:
        await arrivals.put(tracking_ids)
        if attempt_count == 1:
            raise ConnectionError

    async with outbox.running(listeners=[fails_once]):
        await emit_and_commit(outbox, "user.created", JOHN)
        assert await arrival(arrivals) == await arrival(arrivals)


def test_messages_of_one_tracking_block_share_its_id_and_blocks_nest() -> None:
    with tracking() as outer:
        first, second = Message(routing_key="a", body=b""), Message(routing_key="b", body=b"")
        with tracking() as inner:
            third = Message(routing_key="c", body=b"")
    assert first.tracking_ids[:-1] == second.tracking_ids[:-1] == outer
    assert inner[:-1] == outer
    assert third.tracking_ids[:-1] == inner
    assert get_tracking_ids() == ()


# Topic exchange and wildcard matching


async def test_wildcards_match_as_in_a_topic_exchange(outbox: Outbox) -> None:
    routing_keys = ["user", "user.created", "user.deleted", "user.created.late", "order.created"]
    expected = {
        "user.*": ["user.created", "user.deleted"],
        "user.#": ["user", "user.created", "user.deleted", "user.created.late"],
        "*.created": ["user.created", "order.created"],
        "#": routing_keys,
        "#.created.#": ["user.created", "user.created.late", "order.created"],
        "user.created": ["user.created"],
        "*": ["user"],
        "#.*": routing_keys,
        "user.created.*.#": ["user.created.late"],
    }
    received: dict[str, list[str]] = {}

    def listener(binding_key: str) -> Listener:
        async def callback(body: object, routing_key: str) -> None:
            received.setdefault(binding_key, []).append(routing_key)

        return Listener(binding_key, callback, queue=f"bound to {binding_key}")

    async with outbox.running(listeners=[listener(binding_key) for binding_key in expected]):
        async with outbox.transaction() as session:
            for routing_key in routing_keys:
                await outbox.emit(session, routing_key, JOHN)
        await eventually(lambda: _idle(outbox))
    assert {key: sorted(found) for key, found in received.items()} == {
        key: sorted(found) for key, found in expected.items()
    }


async def _idle(outbox: Outbox) -> bool:
    """Whether everything was routed and everything routed was handled."""
    backlog = await outbox.backlog()
    return not backlog.waiting and not any(queue.queued or queue.retrying for queue in backlog.queues)


@on_sqlite
async def test_the_routing_key_is_told_to_whoever_asks_for_it(outbox: Outbox) -> None:
    arrivals: asyncio.Queue[tuple[str, object]] = asyncio.Queue()

    @listen("user.*", queue="events")
    async def on_user_event(routing_key: str, user):  # type: ignore[no-untyped-def]
        await arrivals.put((routing_key, user))

    async with outbox.running(listeners=[on_user_event]):
        await emit_and_commit(outbox, "user.created", {"id": 123, "username": "johndoe"})
        assert await arrival(arrivals) == ("user.created", {"id": 123, "username": "johndoe"})


async def test_every_queue_that_matches_gets_the_message_once(outbox: Outbox) -> None:
    arrivals: asyncio.Queue[str] = asyncio.Queue()

    def listener(queue: str, binding_key: str) -> Listener:
        async def callback(body: object, queue_name: str) -> None:
            await arrivals.put(queue_name)

        return Listener(binding_key, callback, queue=queue)

    # The first two name the same queue in two workers with different binding keys: both match, one copy arrives.
    everything, users, orders = listener("audit", "#"), listener("audit", "user.*"), listener("orders", "order.*")
    async with outbox.running(listeners=[users]):
        pass
    async with outbox.running(listeners=[everything, listener("mail", "user.created"), orders]):
        await emit_and_commit(outbox, "user.created", JOHN)
        found = [await arrival(arrivals) for _ in range(2)]
        await eventually(lambda: _idle(outbox))
    assert sorted(found) == ["audit", "mail"]
    assert arrivals.empty()


@on_sqlite
async def test_what_was_emitted_before_a_queue_existed_waits_for_it(outbox: Outbox) -> None:
    arrivals: asyncio.Queue[object] = asyncio.Queue()

    @listen("user.created", queue="late")
    async def late(user: object) -> None:
        await arrivals.put(user)

    await emit_and_commit(outbox, "user.created", JOHN)
    async with outbox.running(listeners=[late]):
        assert await arrival(arrivals) == JOHN


# Listener arguments


@on_every_driver
async def test_arguments_are_filled_by_their_names(outbox: Outbox) -> None:
    arrivals: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    @listen("user.*", queue="arguments")
    async def arguments(attempt_count, queue_name, tracking_ids, message, routing_key, body):  # type: ignore[no-untyped-def]
        await arrivals.put(dict(locals()))

    async with outbox.running(listeners=[arguments]):
        async with outbox.transaction() as session:
            emitted = await outbox.emit(session, "user.created", JOHN)
        found = await arrival(arrivals)
    assert emitted is not None
    found.pop("arrivals")
    assert found == {
        "attempt_count": 1,
        "queue_name": "arguments",
        "tracking_ids": (emitted.id,),
        "message": emitted,
        "routing_key": "user.created",
        "body": JOHN,
    }


@on_sqlite
async def test_queue_name_tells_an_automatically_generated_name(outbox: Outbox) -> None:
    arrivals: asyncio.Queue[str] = asyncio.Queue()

    @listen("user.created")
    async def nameless(user: object, queue_name: str) -> None:
        await arrivals.put(queue_name)

    async with outbox.running(listeners=[nameless]):
        await emit_and_commit(outbox, "user.created", JOHN)
        assert await arrival(arrivals) == nameless.queue
    assert nameless.queue.endswith("nameless")


@on_sqlite
async def test_attempt_count_starts_from_one_and_counts_up(outbox: Outbox) -> None:
    arrivals: asyncio.Queue[int] = asyncio.Queue()

    @listen("user.created", queue="counts", retry_delays=(0, 0))
    async def counts(user: object, attempt_count: int) -> None:
        await arrivals.put(attempt_count)
        raise ConnectionError

    async with outbox.running(listeners=[counts]):
        await emit_and_commit(outbox, "user.created", JOHN)
        assert [await arrival(arrivals) for _ in range(3)] == [1, 2, 3]


async def nobody_asks() -> None: ...
async def only_names(routing_key: str, message: Message) -> None: ...
async def two_bodies(user: object, order: object) -> None: ...


@pytest.mark.parametrize("callback", [nobody_asks, only_names, two_bodies])
@on_sqlite
async def test_exactly_one_argument_takes_the_body(outbox: Outbox, callback: Callable[..., Any]) -> None:
    with pytest.raises(ConfigurationError, match="exactly one argument takes the body"):
        async with outbox.running(listeners=[Listener("user.created", callback)]):
            pass


@pytest.mark.parametrize("annotation", [User, list[int], datetime.date, dict[str, int], int | None])
@on_sqlite
async def test_the_body_becomes_what_the_annotation_says(outbox: Outbox, annotation: Any) -> None:
    bodies: dict[Any, Any] = {
        User: User(id=123, username="johndoe"),
        list[int]: [1, 2],
        datetime.date: datetime.date(2024, 2, 29),
        dict[str, int]: {"a": 1},
        int | None: None,
    }
    arrivals: asyncio.Queue[object] = asyncio.Queue()

    async def typed(body: object) -> None:
        await arrivals.put(body)

    typed.__annotations__["body"] = annotation
    async with outbox.running(listeners=[Listener("typed", typed, queue="typed")]):
        await emit_and_commit(outbox, "typed", bodies[annotation])
        found = await arrival(arrivals)
    assert found == bodies[annotation]
    assert type(found) is type(bodies[annotation])


@on_sqlite
async def test_pydantic_models_travel_from_emit_to_listener(outbox: Outbox, db_engine: AsyncEngine) -> None:
    arrivals: asyncio.Queue[User] = asyncio.Queue()

    @listen("user.created", queue="models")
    async def on_user_created(user: User) -> None:  # inspects type annotation
        await arrivals.put(user)

    async with outbox.running(listeners=[on_user_created]):
        async with AsyncSession(db_engine) as session:
            await outbox.emit(session, "user.created", User(id=123, username="johndoe"))
            await session.commit()
        assert await arrival(arrivals) == User(id=123, username="johndoe")


@pytest.mark.parametrize(
    ("emitted", "received"),
    [(b'{"id": 123}', {"id": 123}), (b"\xff\xfe no JSON", b"\xff\xfe no JSON"), (b"", b""), (b"{", b"{"), (7, 7)],
)
@on_sqlite
async def test_a_body_without_annotation_is_json_or_else_bytes(
    outbox: Outbox, emitted: object, received: object
) -> None:
    arrivals: asyncio.Queue[object] = asyncio.Queue()

    @listen("any", queue="any")
    async def anything(body):  # type: ignore[no-untyped-def]
        await arrivals.put(body)

    async with outbox.running(listeners=[anything]):
        await emit_and_commit(outbox, "any", emitted)
        assert await arrival(arrivals) == received


@on_sqlite
async def test_a_listener_annotated_with_bytes_gets_the_bytes_as_they_are(outbox: Outbox) -> None:
    arrivals: asyncio.Queue[bytes] = asyncio.Queue()

    @listen("image.uploaded", queue="images")
    async def process_image(image_data: bytes) -> None:
        await arrivals.put(image_data)

    async with outbox.running(listeners=[process_image]):
        await emit_and_commit(outbox, "image.uploaded", b'{"looks": "like JSON"}')
        assert await arrival(arrivals) == b'{"looks": "like JSON"}'


async def test_a_body_that_does_not_fit_its_annotation_is_a_dead_letter_and_the_worker_lives_on(
    outbox: Outbox, recorder: Recorder
) -> None:
    arrivals: asyncio.Queue[User] = asyncio.Queue()

    @listen("user.created", queue="strict")
    async def strict(user: User) -> None:
        await arrivals.put(user)

    async with outbox.running(listeners=[strict]):
        await emit_and_commit(outbox, "user.created", {"id": "not a number", "secret": "of the body"})
        await emit_and_commit(outbox, "user.created", b"\xff")
        await emit_and_commit(outbox, "user.created", User(id=123, username="johndoe"))
        assert await arrival(arrivals) == User(id=123, username="johndoe")
        await recorder.wait_for(Handled, 3)
    letters = {letter.message.body: letter for letter in await outbox.dead_letters.list()}
    assert [str(letter.reason) for letter in letters.values()] == ["undecodable"] * 2
    letter = letters[b'{"id":"not a number","secret":"of the body"}']
    assert "of the body" not in letter.error
    assert "id" in letter.error


@on_every_driver
async def test_a_session_argument_commits_with_the_end_of_the_delivery(
    outbox: Outbox, db_engine: AsyncEngine, user_model: Any, recorder: Recorder
) -> None:
    """The ruling beside its "handlers must be idempotent": asking for the session makes effects happen once."""

    @listen("user.*", queue="effects", retry_delays=(0,))
    async def effects(user: dict[str, Any], session: AsyncSession, attempt_count: int) -> None:
        session.add(user_model(**user))
        await outbox.emit(session, "followed", user["id"])
        await session.flush()
        if attempt_count == 1:
            raise ConnectionError

    @listen("followed", queue="followed")
    async def followed(id: int) -> None: ...

    async with outbox.running(listeners=[effects, followed]):
        await emit_and_commit(outbox, "user.created", JOHN)
        await recorder.wait_for(Handled, 3)
    async with AsyncSession(db_engine) as session:
        assert list(await session.scalars(select(user_model.id))) == [123]
    assert [event.queue for event in recorder.of(Handled)] == ["effects", "effects", "followed"]


# Plain functions


async def test_a_plain_function_runs_in_a_thread_and_carries_the_chain_on(outbox: Outbox, sync_engine: Engine) -> None:
    arrivals: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
    threads: list[threading.Thread] = []

    @listen("user.created", queue="plain")
    def plain(user: dict[str, Any], tracking_ids: tuple[str, ...]) -> None:
        threads.append(threading.current_thread())
        assert get_tracking_ids() == tracking_ids
        with Session(sync_engine) as session, session.begin():
            outbox.emit_sync(session, "user.welcome_email", user)

    @listen("user.welcome_email", queue="email")
    async def email(user: object, tracking_ids: tuple[str, ...]) -> None:
        await arrivals.put(tracking_ids)

    async with outbox.running(listeners=[plain, email]):
        async with outbox.transaction() as session:
            emitted = await outbox.emit(session, "user.created", JOHN)
        first, second = await arrival(arrivals)
    assert emitted is not None
    assert first == emitted.id != second
    assert threads[0] is not threading.main_thread()


async def test_a_plain_function_can_ask_for_a_plain_session(
    outbox: Outbox, db_engine: AsyncEngine, user_model: Any, recorder: Recorder
) -> None:
    @listen("user.created", queue="plain", retry_delays=(0,))
    def plain(user: dict[str, Any], session: Session, attempt_count: int) -> None:
        session.add(user_model(**user))
        session.flush()
        if attempt_count == 1:
            raise ConnectionError

    async with outbox.running(listeners=[plain]):
        await emit_and_commit(outbox, "user.created", JOHN)
        await recorder.wait_for(Handled, 2)
    async with AsyncSession(db_engine) as session:
        assert list(await session.scalars(select(user_model.id))) == [123]
    assert await outbox.messages() == []


# CPU-bound work


@on_sqlite
async def test_cpu_bound_work_can_be_handed_to_a_process_pool(outbox: Outbox) -> None:
    arrivals: asyncio.Queue[bytes] = asyncio.Queue()

    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as process_pool:

        @listen("image.uploaded", queue="thumbnails")
        async def process_image(image_data: bytes) -> None:
            loop = asyncio.get_event_loop()
            processed_data = await loop.run_in_executor(process_pool, zlib.compress, image_data)
            await arrivals.put(processed_data)

        async with outbox.running(listeners=[process_image]):
            await emit_and_commit(outbox, "image.uploaded", b"pixel" * 1000)
            thumbnail = await arrival(arrivals)
            assert zlib.decompress(thumbnail) == b"pixel" * 1000
