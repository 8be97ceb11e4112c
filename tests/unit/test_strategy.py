"""Strategies: what can be said of a listener, and what is refused before any message comes."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import sessionmaker

from outbox import ConfigurationError, FailedAttempt, Listener, Message, Outbox
from outbox.core.attempt import Outcome, Released
from outbox.core.backoff import ErrorBackoff
from outbox.core.listener_options import is_factory, named_level
from outbox.core.settlement import Settlement
from outbox.core.transport import Delivery
from outbox.inbound.concurrency import Lanes, Slots, slots_for
from outbox.transports.memory import MemoryTransport


async def on_order(order: object) -> None: ...


async def named(message: Message) -> str:
    return "lane"


def nothing() -> None: ...


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("lane", "", "lane='': a name, None for no lane, or a function"),
        ("lane", 5, "lane=5: a name"),
        ("lane", named, "make .* a plain function, not async"),
        ("lane", nothing, "lane=.*nothing.*: a function of one argument, the message"),
        ("timeout", -1, "timeout is negative"),
        ("timeout", nothing, "timeout=.*: a function of one argument"),
        ("isolation_level", "SNAPSHOT", "isolation_level='SNAPSHOT': one of READ UNCOMMITTED, READ COMMITTED"),
        ("isolation_level", 3, "isolation_level=3: one of"),
        ("isolation_level", "autocommit", "would commit a listener's work apart from its message"),
        ("session_factory", 5, "session_factory=int: a URL, something that gives a session"),
        ("session_factory", lambda first, second: None, "a function of one argument, the message"),
        ("on_error", "transient", "a function of four arguments: the error, the message, a session and the attempt"),
        ("on_error", lambda error: None, "a function of four arguments"),
        ("retry_delays", {OSError: (1,)}, "say what becomes of all other errors, with Exception"),
        ("retry_delays", {"OSError": (1,), Exception: ()}, "exception classes as keys"),
        ("retry_delays", {Exception: 5}, "retry_delays=5: a sequence"),
    ],
)
def test_what_cannot_work_is_refused_where_it_is_declared(option: str, value: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Listener("order.created", on_order, **{option: value})


@pytest.mark.parametrize("level", ["SERIALIZABLE", "serializable", "Repeatable Read", "READ_COMMITTED"])
def test_a_level_may_be_spelled_as_people_do(level: str) -> None:
    assert named_level(level) == level.upper().replace("_", " ")
    assert Listener("order.created", on_order, isolation_level=level).isolation_level == level


@pytest.mark.parametrize(
    ("factory", "gives_sessions"),
    [
        (async_sessionmaker(), True),
        (sessionmaker(), True),
        (lambda: None, True),
        (lambda message=None: None, True),
        (lambda message: None, False),
    ],
)
def test_what_can_be_called_without_arguments_is_a_factory(factory: Any, gives_sessions: bool) -> None:
    assert is_factory(factory) is gives_sessions


def test_a_timeout_that_is_a_function_is_no_fixed_limit() -> None:
    assert Listener("order.created", on_order, timeout=lambda message: 5).time_limit is None
    assert Listener("order.created", on_order, timeout=5).time_limit == timedelta(seconds=5)


def test_the_last_attempt_is_the_one_without_a_next() -> None:
    assert FailedAttempt(3, None).is_last
    assert not FailedAttempt(3, timedelta(0)).is_last


# Slots.


class Held(Delivery):
    """Stands where a transport's delivery would: only its outcome is of interest here."""

    def __init__(self, delivery: Delivery) -> None:
        self.attempt = delivery.attempt
        self.outcomes: list[Outcome] = []

    def settle(self, outcome: Outcome) -> Settlement:
        self.outcomes.append(outcome)
        return Settlement()


async def held(*keys: str) -> list[Held]:
    listener = Listener("#", on_order, queue="q")
    transport = MemoryTransport()
    await transport.declare([listener])
    await transport.publish([Message(routing_key="order.created", body=b"1", key=key) for key in keys])
    deliveries = transport.consume(listener, 100)
    return [Held(await anext(deliveries)) for _ in keys]


async def test_a_listener_without_lanes_has_plain_slots() -> None:
    started: list[Delivery] = []
    slots = slots_for(Listener("#", on_order, concurrency=2), lambda _, delivery, error: started.append(delivery))
    assert type(slots) is Slots
    [first] = await held("a")
    slots.take(first)
    assert started == [first] and slots.free == 1
    slots.release(first)
    assert slots.free == 2


async def test_a_lane_passes_its_slot_on_and_others_take_theirs() -> None:
    started: list[Delivery] = []
    listener = Listener("#", on_order, concurrency=2, lane=lambda message: message.key)
    slots = slots_for(listener, lambda _, delivery, error: started.append(delivery))
    assert isinstance(slots, Lanes)
    first, second, third, other = await held("a", "a", "a", "b")
    for delivery in (first, second, third, other):
        slots.take(delivery)
    assert started == [first, other] and slots.free == 0
    slots.release(first)
    assert started == [first, other, second] and slots.free == 0
    slots.give_back()
    assert third.outcomes == [Released()] and second.outcomes == []
    slots.release(second)
    slots.release(other)
    assert slots.free == 2
    [fourth] = await held("a")
    slots.take(fourth)
    assert started[-1] is fourth, "the lane is free again"


# Pauses after errors.


def test_pauses_grow_unless_somebody_chose_others() -> None:
    usual = ErrorBackoff(10.0, 0.2, None)
    assert [usual.pause(OSError()) for _ in range(3)] == [0.2, 0.4, 0.8]
    assert usual.pause(OSError(), at_most=0.5) == 0.5
    usual.reset()
    assert usual.pause(OSError()) == 0.2
    fixed = ErrorBackoff(10.0, 0.2, timedelta(seconds=0.25))
    assert [fixed.pause(OSError(), at_most=0.1) for _ in range(3)] == [0.25, 0.25, 0.25]


def test_a_function_says_the_pause_by_count_and_error() -> None:
    def chosen(errors_in_a_row: int, error: BaseException) -> float | None:
        if isinstance(error, ValueError):
            raise RuntimeError("cannot say")
        return errors_in_a_row * 1.5 if isinstance(error, OSError) else None

    trouble = ErrorBackoff(10.0, 0.2, chosen)
    assert [trouble.pause(OSError()), trouble.pause(OSError())] == [1.5, 3.0]
    assert [trouble.pause(KeyError()), trouble.pause(ValueError())] == [0.8, 1.6], "the usual ones went on growing"
    trouble.reset()
    assert trouble.pause(OSError()) == 1.5


@pytest.mark.parametrize("delay", [-1, 0, "soon"])
def test_a_restart_delay_that_is_no_pause_is_refused(delay: Any) -> None:
    with pytest.raises(ConfigurationError, match="restart_delay"):
        Outbox(db_engine_url="sqlite+aiosqlite://", restart_delay=delay)


def test_a_restart_delay_comes_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_RESTART_DELAY", "250ms")
    assert Outbox(db_engine_url="sqlite+aiosqlite://").settings.restart_delay == timedelta(milliseconds=250)


async def test_a_worker_takes_the_pause_that_was_chosen() -> None:
    """The first connection to the transport's deliveries fails; the second one comes after the chosen pause."""
    asked: list[tuple[int, str]] = []
    handled = asyncio.Event()

    class Broken(MemoryTransport):
        def consume(self, listener: Listener, prefetch: int) -> Any:
            if len(asked) < 2:
                raise OSError("the broker is away")
            return super().consume(listener, prefetch)

    def soon(errors_in_a_row: int, error: BaseException) -> float:
        asked.append((errors_in_a_row, str(error)))
        return 0.01

    async def listener(body: object) -> None:
        handled.set()

    transport = Broken()
    outbox = Outbox(transport=transport, restart_delay=soon, log=False)
    async with outbox.running(listeners=[Listener("#", listener, queue="q")]):
        transport.put("q", Message(routing_key="order.created", body=b"1"))
        async with asyncio.timeout(30):
            await handled.wait()
    assert asked == [(1, "the broker is away"), (2, "the broker is away")]
