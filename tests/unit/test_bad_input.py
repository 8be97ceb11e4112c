"""Bad input where messages are emitted: a typed error, quickly, and nothing written.

Each case is something that a program could pass by mistake or a stranger on purpose. Whatever it is, what comes back
is an error of this library that says which part was wrong; no other error escapes, no statement reaches the database.
"""

import math
import time
from array import array
from collections import deque
from dataclasses import dataclass, make_dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from datetime import time as time_of_day
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, field_serializer
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from outbox import (
    BodyNotJson,
    BodyTooLarge,
    HeaderInvalid,
    HeadersTooLarge,
    KeyInvalid,
    MessageError,
    OutboxError,
    RoutingKeyInvalid,
    TimeInvalid,
    TimerIdInvalid,
    TooManyHeaders,
    TransactionError,
)
from tests.support.zones import Broken

QUICKLY = 2.0  # seconds of this process's own work, whatever else the machine does


class Anything(BaseModel):
    value: Any = None


class Constants(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="constants")
    value: float


class Raising(BaseModel):
    value: int = 1

    @field_serializer("value")
    def write(self, value: int) -> str:
        raise KeyError("no word for it")


class Link(BaseModel):
    after: "Link | None" = None


@dataclass
class Part:
    value: Any


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


def nested(depth: int, *, by: str = "list") -> Any:
    value: Any = None
    for _ in range(depth):
        value = [value] if by == "list" else {"a": value}
    return value


def chained(depth: int) -> Link:
    link = Link()
    for _ in range(depth):
        link = Link.model_construct(after=link)
    return link


def circular() -> list[Any]:
    value: list[Any] = []
    value.append({"again": value})
    return value


def released() -> memoryview:
    view = memoryview(b"gone")
    view.release()
    return view


BODIES: list[Any] = [
    # Numbers that JSON lacks.
    pytest.param(math.nan, id="nan"),
    pytest.param(math.inf, id="infinity"),
    pytest.param(-math.inf, id="minus infinity"),
    pytest.param([1, [2, [math.nan]]], id="nan in lists"),
    pytest.param({"a": {"b": math.inf}}, id="infinity in dictionaries"),
    pytest.param({math.inf: 1}, id="infinity as a key"),
    pytest.param((1.0, math.nan), id="nan in a tuple"),
    pytest.param(deque([math.nan]), id="nan in a deque"),
    pytest.param(Part(math.nan), id="nan in a dataclass"),
    pytest.param(Part(Anything(value=math.nan)), id="nan in a model in a dataclass"),
    pytest.param(Anything(value=math.nan), id="nan in a model"),
    pytest.param(Anything(value=[{"a": -math.inf}]), id="infinity deep in a model"),
    pytest.param(Constants(value=math.nan), id="nan in a model that writes constants"),
    pytest.param([Constants(value=math.inf)], id="infinity in a list of such models"),
    # Numbers that no reader takes.
    pytest.param(10**5000, id="5000 digits"),
    pytest.param({"a": [-(10**4301)]}, id="4301 digits in a list"),
    pytest.param({10**5000: 1}, id="5000 digits as a key"),
    pytest.param(Part(10**5000), id="5000 digits in a dataclass"),
    pytest.param(Anything(value=10**5000), id="5000 digits in a model"),
    # Text that is no Unicode.
    pytest.param("\ud800", id="half a character"),
    pytest.param("a\udfffb", id="the other half"),
    pytest.param("\udcff", id="an undecoded byte"),
    pytest.param({"\ud800": 1}, id="half a character as a key"),
    pytest.param(["ok", "\ud800"], id="half a character in a list"),
    pytest.param(Anything(value="\ud800"), id="half a character in a model"),
    pytest.param(Part("\ud800"), id="half a character in a dataclass"),
    # Depth.
    pytest.param(nested(100_000), id="100 000 lists"),
    pytest.param(nested(100_000, by="dict"), id="100 000 dictionaries"),
    pytest.param(Anything(value=nested(100_000)), id="100 000 lists in a model"),
    pytest.param(Part(nested(100_000, by="dict")), id="100 000 dictionaries in a dataclass"),
    pytest.param(chained(100_000), id="100 000 models"),
    pytest.param(circular(), id="a circle"),
    pytest.param(Anything(value=circular()), id="a circle in a model"),
    pytest.param(Part(circular()), id="a circle in a dataclass"),
    # Keys that are none, or that become one.
    pytest.param({(1, 2): 3}, id="a tuple as a key"),
    pytest.param({b"a": 1}, id="bytes as a key"),
    pytest.param({None: 1, "null": 2}, id="null twice"),
    pytest.param({1: "a", "1": "b"}, id="one twice"),
    pytest.param({True: "a", "true": "b"}, id="true twice"),
    pytest.param({"deep": [{1.0: "a", "1.0": "b"}]}, id="one point nothing twice"),
    # Values that nobody can write.
    pytest.param(object(), id="an object"),
    pytest.param(Unprintable(), id="an object without words"),
    pytest.param(lambda: None, id="a function"),
    pytest.param(int, id="a class"),
    pytest.param(Anything, id="a model's class"),
    pytest.param(math, id="a module"),
    pytest.param(ValueError("x"), id="an exception"),
    pytest.param([object()], id="an object in a list"),
    pytest.param(Raising(), id="a model that cannot write itself"),
    pytest.param({"a": b"\xff\xfe"}, id="bytes that are no text"),
    pytest.param({"a": {b"\xff"}}, id="a set of bytes that are no text"),
    pytest.param(make_dataclass("Dynamic", ["value"])(object()), id="an object in a dataclass"),
    pytest.param(released(), id="memory that was given back"),
]

TOO_LARGE: list[Any] = [
    pytest.param(b"\x00" * (1024 * 1024 + 1), id="zeros"),
    pytest.param(bytearray(2 * 1024 * 1024), id="a bytearray"),
    pytest.param(memoryview(array("q", range(200_000))), id="memory whose items have eight bytes"),
    pytest.param("\x00" * 200_000, id="text that grows when it is written"),
    pytest.param(list(range(300_000)), id="many numbers"),
    pytest.param({"a": ["x" * 1000] * 1100}, id="one text many times"),
    pytest.param(Anything(value="x" * 1024 * 1024), id="a model"),
]

HEADERS: list[Any] = [
    *[
        pytest.param({"h": f"a{character}b"}, HeaderInvalid, id=f"value with {name}")
        for name, character in {
            "CR": "\r",
            "LF": "\n",
            "CRLF": "\r\n",
            "NUL": "\x00",
            "TAB": "\t",
            "ESC": "\x1b",
            "DEL": "\x7f",
            "a form feed": "\x0c",
            "half a character": "\ud800",
        }.items()
    ],
    *[
        pytest.param({name: "x"}, HeaderInvalid, id=f"name {name!a}")
        for name in (
            *("", " ", "a b", "a:b", "a\r\nb", "a\n", "a\x00", "a/b", "a,b", "a=b", "a;b", "a(b)", 'a"b', "a@b"),
            *("größe", "日本", "🎉", "a\u200b", "\ud800"),
        )
    ],
    pytest.param({"n" * 256: "x"}, HeaderInvalid, id="a name of 256 characters"),
    pytest.param({"n" * 100_000: "x"}, HeaderInvalid, id="a name of 100 000 characters"),
    *[
        pytest.param({name: "x"}, HeaderInvalid, id=f"name of type {type(name).__name__}")
        for name in (None, 5, 1.5, True, b"h", ("h",))
    ],
    *[
        pytest.param({"h": value}, HeaderInvalid, id=f"value of type {type(value).__name__}")
        for value in (None, 5, 1.5, True, b"x", ["x"], {"x": 1}, date(2030, 1, 1), Decimal(1), 10**5000, object())
    ],
    pytest.param({f"h{number}": "" for number in range(65)}, TooManyHeaders, id="the 65th"),
    pytest.param({f"h{number}": "" for number in range(100_000)}, TooManyHeaders, id="the 100 000th"),
    pytest.param({"h": "x" * (64 * 1024)}, HeadersTooLarge, id="64 KiB and a byte"),
    pytest.param({"h": "🎉" * (16 * 1024)}, HeadersTooLarge, id="64 KiB and a byte in four bytes each"),
    pytest.param({"h": "x" * 10_000_000}, HeadersTooLarge, id="ten megabytes"),
    pytest.param("h: x", HeaderInvalid, id="headers as text"),
    pytest.param(b"h: x", HeaderInvalid, id="headers as bytes"),
    pytest.param(5, HeaderInvalid, id="headers as a number"),
    pytest.param(["h"], HeaderInvalid, id="headers as a list of names"),
    pytest.param([(["h"], "x")], HeaderInvalid, id="headers as pairs with a list for a name"),
    pytest.param(object(), HeaderInvalid, id="headers as an object"),
]

TEXTS: list[Any] = [
    *[
        pytest.param(text, id=name)
        for name, text in {
            "empty": "",
            "256 bytes": "k" * 256,
            "256 bytes in two each": "é" * 128,
            "256 bytes in four each": "🎉" * 64,
            "a megabyte": "k" * 1_000_000,
            "NUL": "a\x00b",
            "LF": "a\nb",
            "CR": "a\rb",
            "CRLF at the end": "a\r\n",
            "TAB": "a\tb",
            "ESC": "\x1b[31m",
            "DEL": "a\x7f",
            "BEL alone": "\x07",
            "half a character": "\ud800",
            "the other half": "a.\udfff",
        }.items()
    ],
    *[
        pytest.param(value, id=f"of type {type(value).__name__}")
        for value in (5, 1.5, True, b"order", ["order"], ("order",), {"order": 1}, object(), Unprintable())
    ],
    pytest.param(10**5000, id="a number that cannot be printed"),
]

ETAS: list[Any] = [
    pytest.param(value, id=name)
    for name, value in {
        "nan": math.nan,
        "infinity": math.inf,
        "minus infinity": -math.inf,
        "a century in milliseconds and one": 36_525 * 86_400_000 + 1,
        "the largest float": 1.7e308,
        "more than a timedelta": 10**20,
        "more than a float": 10**400,
        "less than a float": -(10**400),
        "more than can be printed": 10**5000,
        "true": True,
        "false": False,
        "text": "2030-01-01T00:00:00Z",
        "a number as text": "1000",
        "empty text": "",
        "bytes": b"1000",
        "Decimal": Decimal(1000),
        "Fraction": Fraction(1, 2),
        "complex": 1j,
        "a date": date(2030, 1, 1),
        "a time of day": time_of_day(12),
        "a list": [1000],
        "an object": object(),
        "the longest timedelta": timedelta.max,
        "the shortest timedelta": timedelta.min,
        "year 9999 in the west": datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-12))),
        "a broken time zone": datetime(2030, 1, 1, tzinfo=Broken()),
    }.items()
]

EXPIRATIONS: list[Any] = [
    *[case for case in ETAS if not isinstance(case.values[0], datetime) and "milliseconds" not in case.id],
    pytest.param(0, id="nothing"),
    pytest.param(0.0, id="nothing as a float"),
    pytest.param(-0.0, id="minus nothing"),
    pytest.param(timedelta(0), id="a timedelta of nothing"),
    pytest.param(1e-9, id="less than a microsecond"),
    pytest.param(-1, id="negative"),
    pytest.param(timedelta(microseconds=-1), id="a negative timedelta"),
    pytest.param(datetime(2030, 1, 1, tzinfo=UTC), id="a moment"),
    pytest.param(36_525 * 86_400 + 1, id="a century and a second"),
]

CONTENT_TYPES: list[Any] = [
    *[
        pytest.param(text, id=name)
        for name, text in {
            "CRLF": "text/plain\r\n",
            "NUL": "text/\x00",
            "LF alone": "\n",
            "no media type": "xyz",
            "no subtype": "text/",
            "no type": "/plain; charset=utf-8",
            "DEL": "text/plain\x7f",
            "not ASCII": "text/größe",
            "half a character": "\ud800",
            "256 characters": "x" * 256,
            "100 000 characters": "x" * 100_000,
        }.items()
    ],
    *[
        pytest.param(value, id=f"of type {type(value).__name__}")
        for value in (5, b"text/plain", ["text/plain"], True, object())
    ],
]


def refused(emitting: Any, error: type[OutboxError], **options: Any) -> None:
    """Emit, and see it refused with exactly this error, quickly, before any statement."""
    began = time.process_time()
    with pytest.raises(MessageError) as caught:
        emitting.emit(**options)
    assert time.process_time() - began < QUICKLY
    assert type(caught.value) is error
    assert emitting.statements == []
    assert 10 < len(str(caught.value)) < 2000, "a text for people: it says something, and not everything"


@pytest.mark.parametrize("body", BODIES)
def test_a_body_that_strict_json_cannot_hold_is_refused(emitting: Any, body: Any) -> None:
    refused(emitting, BodyNotJson, body=body)


@pytest.mark.parametrize("body", TOO_LARGE)
def test_a_body_that_is_too_large_is_refused(emitting: Any, body: Any) -> None:
    refused(emitting, BodyTooLarge, body=body)


@pytest.mark.parametrize(("headers", "error"), HEADERS)
def test_headers_that_cannot_travel_are_refused(emitting: Any, headers: Any, error: type[OutboxError]) -> None:
    refused(emitting, error, headers=headers)


@pytest.mark.parametrize("text", [*TEXTS, pytest.param(None, id="of type NoneType")])
def test_a_routing_key_that_cannot_travel_is_refused(emitting: Any, text: Any) -> None:
    refused(emitting, RoutingKeyInvalid, routing_key=text)


@pytest.mark.parametrize("text", TEXTS)
def test_a_key_that_cannot_be_stored_is_refused(emitting: Any, text: Any) -> None:
    refused(emitting, KeyInvalid, key=text)


@pytest.mark.parametrize("text", TEXTS)
def test_a_timer_id_that_cannot_be_stored_is_refused(emitting: Any, text: Any) -> None:
    refused(emitting, TimerIdInvalid, timer_id=text)


@pytest.mark.parametrize("text", [*TEXTS, pytest.param(None, id="of type NoneType")])
def test_a_timer_id_that_cannot_be_stored_is_refused_where_timers_are_cancelled(emitting: Any, text: Any) -> None:
    with emitting.engine.begin() as connection, pytest.raises(TimerIdInvalid):
        emitting.outbox.cancel_timer_sync(connection, text)
    assert emitting.statements == []


@pytest.mark.parametrize("eta", ETAS)
def test_an_eta_that_is_no_time_is_refused(emitting: Any, eta: Any) -> None:
    refused(emitting, TimeInvalid, eta=eta)


@pytest.mark.parametrize("expiration", EXPIRATIONS)
def test_an_expiration_that_is_no_duration_is_refused(emitting: Any, expiration: Any) -> None:
    refused(emitting, TimeInvalid, expiration=expiration)


@pytest.mark.parametrize("content_type", CONTENT_TYPES)
def test_a_content_type_that_cannot_travel_is_refused(emitting: Any, content_type: Any) -> None:
    refused(emitting, HeaderInvalid, content_type=content_type)


@pytest.mark.parametrize("source", ["the imports of today", "/büro", "/100%", "a\rb", "\ud800"])
def test_a_source_that_is_no_uri_reference_is_refused(emitting: Any, source: str) -> None:
    refused(emitting, HeaderInvalid, source=source)
    refused(emitting, HeaderInvalid, headers={"ce-source": source})


@pytest.mark.parametrize(
    "session",
    [
        pytest.param(None, id="nothing"),
        pytest.param("postgresql://h/d", id="a URL"),
        pytest.param(create_engine("sqlite://"), id="an engine"),
        pytest.param(create_async_engine("sqlite+aiosqlite://"), id="an async engine"),
        pytest.param(AsyncSession, id="a class"),
        pytest.param(object(), id="an object"),
    ],
)
async def test_what_has_no_transaction_is_refused_with_what_has_one(emitting: Any, session: Any) -> None:
    with pytest.raises(TransactionError, match="Session"):
        emitting.outbox.emit_sync(session, "order.created", {})
    with pytest.raises(TransactionError, match="AsyncSession"):
        await emitting.outbox.emit(session, "order.created", {})
    with pytest.raises(TransactionError, match="AsyncSession"):
        await emitting.outbox.cancel_timer(session, "timer")


async def test_an_async_session_without_a_loop_is_refused_with_what_to_call(emitting: Any) -> None:
    async with AsyncSession(create_async_engine("sqlite+aiosqlite://")) as session:
        with pytest.raises(TransactionError, match="await emit"):
            emitting.outbox.emit_sync(session, "order.created", {})


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"routing_key": "order.*.#"}, id="wildcards in a routing key"),
        pytest.param({"routing_key": "🎉" * 63}, id="emoji in a routing key"),
        pytest.param({"routing_key": ".."}, id="a routing key of empty words"),
        pytest.param({"routing_key": "'; DROP TABLE outbox_table; --"}, id="SQL in a routing key"),
        pytest.param({"key": "%s %(a)s :a ? $1"}, id="placeholders in a key"),
        pytest.param({"timer_id": "\\'\"`"}, id="quotes in a timer id"),
        pytest.param({"headers": {"h": "\u202e\u2028\x85"}}, id="odd but harmless characters in a header"),
        pytest.param({"body": "\ufeff"}, id="a byte order mark in text"),
        pytest.param({"body": b"\xef\xbb\xbf{}"}, id="a byte order mark in bytes"),
        pytest.param({"body": {"a": {1, 2}}}, id="a set"),
        pytest.param({"body": nested(100)}, id="a hundred lists"),
        pytest.param({"body": 10**4000}, id="4000 digits"),
        pytest.param({"eta": datetime(2030, 3, 31, 2, 30)}, id="an eta without a time zone"),  # noqa: DTZ001
        pytest.param({"eta": -5}, id="an eta in the past"),
        pytest.param({"eta": datetime(1999, 1, 1, tzinfo=UTC)}, id="an eta in another century"),
    ],
)
def test_what_only_looks_bad_is_stored_as_it_is(emitting: Any, options: dict[str, Any]) -> None:
    message = emitting.emit(**options)
    row = emitting.row()
    assert (row.routing_key, row.key, row.timer_id) == (
        options.get("routing_key", "order.created"),
        options.get("key"),
        options.get("timer_id"),
    )
    assert row.body == message.body
