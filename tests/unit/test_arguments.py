"""Arguments: what a listener's callback asks for, decided once from its signature."""

import asyncio
from dataclasses import dataclass
from typing import Annotated, Any, Optional

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from outbox import ConfigurationError, Listener, Message
from outbox.inbound.arguments import Arguments
from tests.unit.listening import SESSION, Order, call, refused


@dataclass
class Receipt:
    id: int


# By name.


async def test_five_names_are_filled() -> None:
    async def listener(order, routing_key, message, tracking_ids, queue_name, attempt_count):  # type: ignore[no-untyped-def]
        return order, routing_key, message.id, tracking_ids, queue_name, attempt_count

    assert await call(listener) == ({"id": 1}, "order.created", "this", ("entry", "this"), "orders", 1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("routing_key", "order.created"),
        ("tracking_ids", ("entry", "this")),
        ("queue_name", "orders"),
        ("attempt_count", 1),
    ],
)
async def test_each_name_is_filled_by_itself_wherever_it_stands(name: str, expected: object) -> None:
    first: dict[str, Any] = {}
    exec(f"async def listener({name}, order): return {name}, order", first)  # noqa: S102 - the name is the test's own
    last: dict[str, Any] = {}
    exec(f"def listener(order, *, {name}=None): return {name}, order", last)  # noqa: S102
    assert await call(first["listener"]) == (expected, {"id": 1})
    assert await call(last["listener"]) == (expected, {"id": 1})


async def test_a_name_with_a_default_is_filled_all_the_same() -> None:
    async def listener(order: object, attempt_count: int = 0, queue_name: str = "") -> object:
        return attempt_count, queue_name

    assert await call(listener) == (1, "orders")


@pytest.mark.parametrize("name", ["session", "headers", "body", "key", "delivery", "request", "id", "connection"])
async def test_no_further_name_means_anything(name: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"async def listener({name}): return {name}", namespace)  # noqa: S102 - the name is the test's own
    assert await call(namespace["listener"]) == {"id": 1}


async def test_message_without_annotation_is_what_the_transport_holds() -> None:
    async def listener(order, message):  # type: ignore[no-untyped-def]
        return message

    message = await call(listener)
    assert isinstance(message, Message)  # no client library here: our own


# By annotation.


async def test_a_message_is_given_under_any_name() -> None:
    async def listener(order: object, envelope: Message) -> object:
        return envelope.routing_key, envelope.body

    assert await call(listener) == ("order.created", b'{"id":1}')


async def test_an_async_session_is_given_under_any_name() -> None:
    async def listener(order: object, database: AsyncSession) -> object:
        return database

    assert await call(listener) is SESSION


async def test_a_session_is_given_to_a_plain_function() -> None:
    def listener(order: object, database: Session) -> object:
        return database

    assert await call(listener) is SESSION


async def test_a_session_of_a_class_of_your_own_is_a_session() -> None:
    class OurSession(AsyncSession): ...

    async def listener(order: object, database: OurSession) -> object:
        return database

    assert await call(listener) is SESSION


def test_the_kind_of_session_is_known_before_any_message_comes() -> None:
    async def without(order: object) -> None: ...

    async def asynchronous(order: object, session: AsyncSession) -> None: ...

    def synchronous(order: object, session: Session) -> None: ...

    found = [Arguments.of(Listener("#", each)) for each in (without, asynchronous, synchronous)]
    assert [each.session for each in found] == [None, AsyncSession, Session]
    assert [each.is_async for each in found] == [True, True, False]


def test_a_plain_function_is_refused_an_async_session() -> None:
    def listener(order: object, session: AsyncSession) -> None: ...

    assert "async def" in refused(listener)


def test_an_async_function_is_refused_a_plain_session() -> None:
    async def listener(order: object, session: Session) -> None: ...

    assert "AsyncSession" in refused(listener)


def test_two_sessions_are_refused_because_there_is_one_transaction() -> None:
    async def listener(order: object, first: AsyncSession, second: AsyncSession) -> None: ...

    assert "session" in refused(listener).lower()


async def optional_by_bar(order: object, session: AsyncSession | None = None) -> object:
    return session


async def optional_by_word(order: object, session: Optional[AsyncSession] = None) -> object:  # noqa: UP045
    return session


async def annotated(order: object, session: Annotated[AsyncSession, "billing"] = None) -> object:  # type: ignore[assignment]
    return session


@pytest.mark.parametrize("callback", [optional_by_bar, optional_by_word, annotated])
async def test_a_session_that_is_optional_is_given_or_refused_but_never_forgotten(callback: Any) -> None:
    """Without it the listener would run, and its effects would happen more than once."""
    try:
        given = await call(callback)
    except ConfigurationError:
        return
    assert given is SESSION


async def test_an_optional_message_is_given_or_refused_but_never_forgotten() -> None:
    async def listener(order: object, message_at_hand: Message | None = None) -> object:
        return message_at_hand

    try:
        given = await call(listener)
    except ConfigurationError:
        return
    assert isinstance(given, Message)


# The body.


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (Order, Order(id=1)),
        (Receipt, Receipt(1)),
        (dict[str, int], {"id": 1}),
        (dict, {"id": 1}),
        (bytes, b'{"id":1}'),
        (Any, {"id": 1}),
        (object, {"id": 1}),
        (Order | None, Order(id=1)),
        (Annotated[Order, "of the shop"], Order(id=1)),
    ],
)
async def test_the_argument_that_is_left_takes_the_body_as_annotated(annotation: Any, expected: object) -> None:
    async def listener(anything, routing_key):  # type: ignore[no-untyped-def]
        return anything

    listener.__annotations__["anything"] = annotation
    assert await call(listener) == expected


async def test_a_body_argument_may_have_a_default_if_no_other_wants_the_body() -> None:
    async def listener(order: object = None) -> object:
        return order

    assert await call(listener) == {"id": 1}


async def test_further_arguments_keep_their_defaults() -> None:
    async def listener(order: object, limit: int = 5, *more: object, log: Any = print, **others: object) -> object:
        return order, limit, more, log, others

    assert await call(listener) == ({"id": 1}, 5, (), print, {})


async def test_keyword_only_arguments_are_filled() -> None:
    def listener(*, order: Order, attempt_count: int) -> object:
        return order, attempt_count

    assert await call(listener) == (Order(id=1), 1)


async def test_positional_only_arguments_are_filled() -> None:
    def listener(order: Order, routing_key: str, /, attempt_count: int) -> object:
        return order, routing_key, attempt_count

    assert await call(listener) == (Order(id=1), "order.created", 1)


async def test_a_positional_only_argument_keeps_its_default_and_its_place() -> None:
    def listener(limit: int = 5, routing_key: str = "", /, *, order: object) -> object:
        return limit, routing_key, order

    assert await call(listener) == (5, "order.created", {"id": 1})


async def none() -> None: ...


async def only_names(routing_key: str, attempt_count: int) -> None: ...


async def only_a_session(session: AsyncSession) -> None: ...


async def only_a_message(message: Message) -> None: ...


async def only_stars(*arguments: object, **options: object) -> None: ...


async def two(order: object, customer: object) -> None: ...


async def two_defaults(order: object = None, customer: object = None) -> None: ...


@pytest.mark.parametrize(
    ("callback", "found"),
    [
        (none, "none"),
        (only_names, "none"),
        (only_a_session, "none"),
        (only_a_message, "none"),
        (only_stars, "none"),
        (two, "order, customer"),
        (two_defaults, "order, customer"),
        (lambda: None, "none"),
        (type("Nothing", (), {}), "none"),
    ],
)
def test_exactly_one_argument_takes_the_body_or_the_text_says_what_was_found(callback: Any, found: str) -> None:
    assert refused(callback).endswith(f"found: {found}")


class Odd:
    __signature__ = "order"  # a library's own idea of one

    def __call__(self, order: object) -> None: ...


@pytest.mark.parametrize("callback", [type, Odd()])
def test_a_callback_without_a_signature_is_refused(callback: Any) -> None:
    assert "signature" in refused(callback)


@pytest.mark.parametrize("annotation", [AsyncEngine, list[AsyncEngine], 5])
def test_an_annotation_that_json_cannot_fill_is_refused_with_the_listeners_queue(annotation: Any) -> None:
    async def listener(order): ...  # type: ignore[no-untyped-def]

    listener.__annotations__["order"] = annotation
    refused(listener)


# A call leaves nothing behind.


async def test_one_listeners_values_do_not_reach_the_next_call() -> None:
    async def listener(order: dict[str, int], envelope: Message) -> object:
        order["id"] += 1
        return order["id"], envelope.body

    assert await asyncio.gather(call(listener), call(listener, b'{"id":5}')) == [(2, b'{"id":1}'), (6, b'{"id":5}')]
