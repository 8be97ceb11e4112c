"""Bad input where messages are handled: a dead letter, never a crash, a hang or a leftover."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import Backlog, DeadLetter, Listener, Message, Outbox, Reason
from outbox.core.dead_letter import LARGEST_ERROR
from outbox.core.events import Event, Handled
from outbox.transports.memory import MemoryTransport

LONG = 60.0  # seconds after which a test is lost
SOON = 2.0  # seconds within which a delivery ends, however it ends


class Order(BaseModel):
    id: int


BODIES = {
    "nothing": b"",
    "a space": b" ",
    "no JSON": b"not json",
    "no UTF-8": b"\xff\xfe\xfd",
    "a cut character": '{"id": "é'.encode()[:-1],
    "a byte order mark": b'\xef\xbb\xbf{"id":1}',
    "UTF-16": '{"id":1}'.encode("utf-16"),
    "UTF-32": '{"id":1}'.encode("utf-32"),
    "NUL": b"\x00",
    "NUL after JSON": b'{"id":1}\x00',
    "cut JSON": b'{"id":1',
    "more after JSON": b'{"id":1}{"id":2}',
    "a comma too many": b'{"id":1,}',
    "single quotes": b"{'id':1}",
    "a comment": b'{"id":1} // one',
    "NaN": b'{"id":NaN}',
    "Infinity": b'{"id":Infinity}',
    "5000 digits": b'{"id":' + b"9" * 5000 + b"}",
    "a hundred thousand digits": b'{"id":' + b"9" * 100_000 + b"}",
    "a huge exponent": b'{"id":1e999999999}',
    "half a character": b'{"id":"\\ud800"}',
    "a hundred thousand lists": b"[" * 100_000,
    "a hundred thousand dictionaries": b'{"id":' * 100_000,
    "lists that close": b"[" * 50_000 + b"]" * 50_000,
    "a million commas": b"[" + b"," * 1_000_000 + b"]",
    "null": b"null",
    "a number": b"1",
    "a list": b'[{"id":1}]',
    "another model": b'{"name":"pen"}',
    "text for a number": b'{"id":"one"}',
    "null for a number": b'{"id":null}',
    "a fraction for a number": b'{"id":1.5}',
    "pickle": b"\x80\x04N.",
    "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
    "a megabyte of zeros": b"\x00" * 1_000_000,
}

# Read by what takes any JSON: the strict queues refuse these, the loose one has values.
JSON_FOR_THE_LOOSE = {
    "a huge exponent",
    "half a character",
    "null",
    "a number",
    "a list",
    "another model",
    "text for a number",
    "null for a number",
    "a fraction for a number",
}
if sys.version_info >= (3, 14):  # its parser goes as deep as the stack of the thread allows
    JSON_FOR_THE_LOOSE.add("lists that close")
EITHER_WAY = {"a byte order mark"}  # a reader may ignore the mark


@dataclass
class Run:
    """What became of all bad bodies in one worker."""

    letters: dict[tuple[str, str], DeadLetter] = field(default_factory=dict)  # by queue and case
    calls: list[tuple[str, object]] = field(default_factory=list)
    backlog: Backlog | None = None
    took: float = 0.0


class Ends:
    """An observer that counts how many deliveries have ended."""

    def __init__(self) -> None:
        self.handled: list[Handled] = []
        self._changed = asyncio.Event()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Handled):
            self.handled.append(event)
            self._changed.set()

    async def reach(self, count: int, within: float) -> None:
        async with asyncio.timeout(within):
            while len(self.handled) < count:
                self._changed.clear()
                await self._changed.wait()


STRICT = ("strict", "session", "thread")


def listeners_into(calls: list[tuple[str, object]]) -> list[Listener]:
    async def strict(order: Order) -> None:
        calls.append(("strict", order))

    async def session(order: Order, database: AsyncSession) -> None:
        calls.append(("session", order))

    def thread(order: Order) -> None:
        calls.append(("thread", order))

    async def loose(body) -> None:  # type: ignore[no-untyped-def]
        calls.append(("loose", body))

    return [Listener(f"{each.__name__}.#", each, queue=each.__name__) for each in (strict, session, thread, loose)]


async def handle_everything(database: Path) -> Run:
    run, ends, cases = Run(), Ends(), {}
    outbox = Outbox(db_engine_url=f"sqlite:///{database}", observers=[ends], poll_interval=0.05, grace=5)
    began = time.monotonic()
    async with outbox.running(listeners=listeners_into(run.calls)):
        async with outbox.transaction() as session:
            for queue in (*STRICT, "loose"):
                for case, body in BODIES.items():
                    message = await outbox.emit(session, f"{queue}.bad", body)
                    assert message is not None
                    cases[message.id] = (queue, case)
        await ends.reach(len(cases), LONG)
        async with outbox.transaction() as session:
            for queue in (*STRICT, "loose"):
                await outbox.emit(session, f"{queue}.good", {"id": 1})
        await ends.reach(len(cases) + 4, LONG)
    run.took = time.monotonic() - began
    run.letters = {cases[letter.message.id]: letter for letter in await outbox.dead_letters.list(limit=1000)}
    run.backlog = await outbox.backlog()
    await outbox.close()
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One worker on a SQLite file that was given every bad body, and then a good one on each queue."""
    return asyncio.run(handle_everything(tmp_path_factory.mktemp("bad") / "outbox.db"))


@pytest.mark.parametrize("case", BODIES)
@pytest.mark.parametrize("queue", STRICT)
def test_an_undecodable_body_becomes_a_dead_letter_with_the_body_unchanged(run: Run, queue: str, case: str) -> None:
    letter = run.letters[queue, case]
    assert (letter.queue, letter.reason, letter.attempt_count) == (queue, Reason.UNDECODABLE, 1)
    assert letter.message.body == BODIES[case]
    assert letter.error
    assert len(letter.error.encode()) <= LARGEST_ERROR


def test_no_listener_saw_a_body_that_is_not_what_it_asked_for(run: Run) -> None:
    seen = [call for call in run.calls if call[0] != "loose"]
    assert sorted(seen, key=str) == sorted([(queue, Order(id=1)) for queue in STRICT], key=str)


@pytest.mark.parametrize("case", BODIES)
def test_a_listener_without_annotation_gets_json_or_the_bytes(run: Run, case: str) -> None:
    bodies = [value for queue, value in run.calls if queue == "loose"]
    assert ("loose", case) not in run.letters
    if case in EITHER_WAY:
        assert BODIES[case] in bodies or {"id": 1} in bodies
    else:
        assert (BODIES[case] in bodies) == (case not in JSON_FOR_THE_LOOSE)


def test_nothing_is_left_behind_and_the_worker_goes_on(run: Run) -> None:
    assert run.backlog is not None
    assert (run.backlog.waiting, run.backlog.leased, run.backlog.unroutable) == (0, 0, 0)
    assert {(queue.queued, queue.retrying, queue.leased) for queue in run.backlog.queues} == {(0, 0, 0)}
    assert run.backlog.dead == len(BODIES) * len(STRICT)
    assert ("loose", {"id": 1}) in run.calls


def test_bad_bodies_hold_nobody_up(run: Run) -> None:
    assert run.took < LONG / 2


# Listeners that end in odd ways.


class Odd(BaseException):
    """What some libraries derive from so that nobody catches it by mistake."""


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


async def raises_odd(order: object) -> None:
    raise Odd("not an Exception")


def raises_odd_in_a_thread(order: object) -> None:
    raise Odd("not an Exception")


async def raises_a_group(order: object) -> None:
    raise BaseExceptionGroup("several", [Odd("not an Exception"), ValueError("x")])


async def exits(order: object) -> None:
    raise SystemExit(3)


def exits_in_a_thread(order: object) -> None:
    raise SystemExit(3)


async def takes_the_next_of_nothing(order: object) -> None:
    next(iter([]))


def takes_the_next_of_nothing_in_a_thread(order: object) -> None:
    next(iter([]))


async def is_cancelled_by_its_library(order: object) -> None:
    raise asyncio.CancelledError


async def runs_out_of_stack(order: object) -> None:
    def deeper() -> None:
        deeper()

    deeper()


async def has_no_words(order: object) -> None:
    raise Wordless


async def breaks_the_terminal(order: object) -> None:
    raise ValueError("\x00\x1b[2J\ud800\r\n" + "é" * 100_000)


async def raises_the_class(order: object) -> None:
    raise KeyError


async def wants_more_than_it_gets(order: object) -> None:
    raise TypeError("missing 1 required positional argument")


async def one_outcome(callback: Callable[..., Any], **options: Any) -> tuple[Handled, list[DeadLetter]]:
    """How a delivery ends when its listener ends like this, without retries."""
    ends, transport = Ends(), MemoryTransport()
    outbox = Outbox(transport=transport, observers=[ends], grace=0.1, **options)
    async with outbox.running(listeners=[Listener("#", callback, queue="odd", retry_delays=())]):
        await transport.publish([Message(routing_key="order.created", body=b'{"id":1}')])
        await ends.reach(1, SOON)
    return ends.handled[0], await transport.dead_letters.list()


@pytest.mark.parametrize(
    "callback",
    [
        raises_odd,
        raises_odd_in_a_thread,
        raises_a_group,
        exits,
        exits_in_a_thread,
        takes_the_next_of_nothing,
        takes_the_next_of_nothing_in_a_thread,
        is_cancelled_by_its_library,
        runs_out_of_stack,
        has_no_words,
        breaks_the_terminal,
        raises_the_class,
        wants_more_than_it_gets,
    ],
    ids=lambda callback: callback.__name__,
)
async def test_whatever_a_listener_raises_its_delivery_ends_in_one_outcome(callback: Callable[..., Any]) -> None:
    _, [letter] = await one_outcome(callback)
    assert letter.reason is Reason.EXHAUSTED
    assert 0 < len(letter.error.encode()) <= LARGEST_ERROR
    assert "\x00" not in letter.error


@pytest.mark.parametrize(
    "retry_delays",
    [
        pytest.param(lambda attempt, error: 1 / 0, id="raises"),
        pytest.param(lambda attempt, error: -1, id="negative"),
        pytest.param(lambda attempt, error: float("nan"), id="nan"),
        pytest.param(lambda attempt, error: "soon", id="text"),
        pytest.param(lambda attempt, error: 10**400, id="endless"),
        pytest.param(lambda: 1, id="takes no arguments"),
    ],
)
async def test_a_retry_function_that_cannot_decide_ends_in_a_dead_letter_with_both_errors(retry_delays: Any) -> None:
    ends, transport = Ends(), MemoryTransport()
    outbox = Outbox(transport=transport, observers=[ends], grace=0.1)
    listener = Listener("#", raises_the_class, queue="odd", retry_delays=retry_delays)
    async with outbox.running(listeners=[listener]):
        await transport.publish([Message(routing_key="order.created", body=b"1")])
        await ends.reach(1, SOON)
    [letter] = await transport.dead_letters.list()
    assert letter.reason is Reason.EXHAUSTED
    assert "retry_delays" in letter.error
    assert "KeyError" in letter.error


@pytest.mark.parametrize(
    "redact_error",
    [
        pytest.param(lambda text: 1 / 0, id="raises"),
        pytest.param(lambda text: None, id="nothing"),
        pytest.param(lambda text: b"bytes", id="bytes"),
        pytest.param(lambda text: "\x00\ud800" * 100_000, id="what cannot be stored"),
    ],
)
async def test_a_redaction_that_fails_keeps_the_text_back_and_not_the_outcome(redact_error: Any) -> None:
    async def listener(order: object) -> None:
        raise ValueError("s3cret")

    _, [letter] = await one_outcome(listener, redact_error=redact_error)
    assert letter.reason is Reason.EXHAUSTED
    assert "s3cret" not in letter.error
    assert len(letter.error.encode()) <= LARGEST_ERROR


async def test_a_redaction_sees_every_error_and_decides_what_is_kept() -> None:
    async def listener(order: object) -> None:
        raise ValueError("card 4111")

    _, [letter] = await one_outcome(listener, redact_error=lambda text: text.replace("4111", "****"))
    assert "card ****" in letter.error
    assert "4111" not in letter.error.splitlines()[0]


async def test_a_function_that_hands_back_a_coroutine_is_not_taken_for_handled() -> None:
    """A decorator that forgets to await: the listener has not run, so the message must not be gone."""
    made: list[Coroutine[Any, Any, None]] = []
    ran = asyncio.Event()

    async def listener(order: object) -> None:
        ran.set()

    @functools.wraps(listener)
    def forgetful(*arguments: Any, **options: Any) -> Coroutine[Any, Any, None]:
        made.append(listener(*arguments, **options))
        return made[-1]

    try:
        _, letters = await one_outcome(forgetful)
    finally:
        for coroutine in made:
            coroutine.close()
    assert ran.is_set() or letters, "neither did it run nor is it a dead letter"


class Awaitable:
    """What a client library hands back instead of a coroutine."""

    def __init__(self, ran: asyncio.Event) -> None:
        self._ran = ran

    def __await__(self) -> Generator[Any, None, None]:
        self._ran.set()
        yield from asyncio.sleep(0).__await__()


async def test_an_awaitable_that_a_listener_hands_back_is_awaited_or_refused() -> None:
    ran = asyncio.Event()

    def plain(order: object) -> Awaitable:
        return Awaitable(ran)

    async def in_loop(order: object) -> Awaitable:
        return Awaitable(ran)

    _, [letter] = await one_outcome(plain)
    assert "an awaitable that nothing awaits" in letter.error and not ran.is_set()
    _, letters = await one_outcome(in_loop)
    assert ran.is_set() and not letters


async def test_a_generator_that_a_listener_hands_back_is_not_taken_for_handled() -> None:
    def work(order: object) -> Iterator[None]:
        yield

    _, [letter] = await one_outcome(lambda order: work(order))
    assert "a generator that nothing awaits" in letter.error


async def test_a_context_manager_that_a_listener_hands_back_is_not_taken_for_handled() -> None:
    ran: list[str] = []

    @contextlib.contextmanager
    def plain(order: object) -> Iterator[None]:
        ran.append("plain")
        yield

    @contextlib.asynccontextmanager
    async def in_loop(order: object) -> AsyncIterator[None]:
        ran.append("in loop")
        yield

    def logged(function: Callable[..., object]) -> Callable[..., object]:
        return functools.wraps(function)(lambda *arguments, **options: function(*arguments, **options))

    async def returns(order: object) -> object:
        return in_loop(order)

    for listener in (logged(plain), logged(in_loop), lambda order: plain(order), returns):
        _, [letter] = await one_outcome(listener)
        assert "a context manager that nothing awaits" in letter.error
    assert ran == []
