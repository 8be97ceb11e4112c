"""Limits: what a message may be, each limit with its own error, before anything reaches the database."""

from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Any

import pytest

from outbox import (
    BodyNotJson,
    BodyTooLarge,
    CloudEventInvalid,
    ConfigurationError,
    HeaderInvalid,
    HeadersTooLarge,
    KeyInvalid,
    MessageError,
    MessageIdInvalid,
    OutboxError,
    RoutingKeyInvalid,
    TimeInvalid,
    TimerIdInvalid,
    TooManyHeaders,
)

KIB, MIB = 1024, 1024 * 1024


def headers_of(size: int) -> dict[str, str]:
    """Headers whose names and values have this many bytes together."""
    return {"h": "x" * (size - 1)}


AT_THE_LIMIT: list[Any] = [
    pytest.param({"body": b"x" * MIB}, id="a body of 1 MiB"),
    pytest.param({"body": "x" * (MIB - 2)}, id="a JSON body of 1 MiB with its quotes"),
    pytest.param({"body": b""}, id="an empty body"),
    pytest.param({"headers": {f"h{number}": "x" for number in range(64)}}, id="64 headers"),
    pytest.param({"headers": headers_of(64 * KIB)}, id="64 KiB of headers"),
    pytest.param({"headers": {"n" * 255: "x"}}, id="a header's name of 255 characters"),
    pytest.param({"headers": {"A-Z_a.z-0_9.": ""}}, id="every character a header's name may have"),
    pytest.param({"headers": {"city": "Zürich 🎉"}}, id="a header's value that is not ASCII"),
    pytest.param({"headers": {}}, id="no headers"),
    pytest.param({"headers": {"x-trace": "1", "outbox": "2", "CCC": "3"}}, id="names that are nearly reserved"),
    pytest.param({"routing_key": "k" * 255}, id="a routing key of 255 bytes"),
    pytest.param({"routing_key": "é" * 127 + "k"}, id="a routing key of 255 bytes, not ASCII"),
    pytest.param({"routing_key": "order.*"}, id="a routing key that looks like a pattern"),
    pytest.param({"routing_key": "order created 🎉"}, id="a routing key with a space and an emoji"),
    pytest.param({"key": "k" * 255}, id="a key of 255 bytes"),
    pytest.param({"timer_id": "t" * 255}, id="a timer id of 255 bytes"),
    pytest.param({"content_type": "text/plain; charset=utf-8"}, id="a content type with a parameter"),
    pytest.param({"eta": timedelta(days=36_525)}, id="due in a hundred years"),
    pytest.param({"expiration": timedelta(days=36_525)}, id="good for a hundred years"),
]

BEYOND: list[Any] = [
    pytest.param({"body": b"x" * (MIB + 1)}, BodyTooLarge, id="a body of 1 MiB and a byte"),
    pytest.param({"body": "x" * (MIB - 1)}, BodyTooLarge, id="a JSON body whose quotes are too much"),
    pytest.param({"body": "é" * (MIB // 2)}, BodyTooLarge, id="a body is counted in bytes"),
    pytest.param({"body": float("nan")}, BodyNotJson, id="a body that is no JSON"),
    pytest.param({"headers": {f"h{number}": "x" for number in range(65)}}, TooManyHeaders, id="65 headers"),
    pytest.param({"headers": headers_of(64 * KIB + 1)}, HeadersTooLarge, id="64 KiB of headers and a byte"),
    pytest.param({"headers": {"h": "é" * (32 * KIB)}}, HeadersTooLarge, id="headers are counted in bytes"),
    pytest.param(
        {"headers": {f"h{number:02}": "x" * 1021 for number in range(64)} | {"h00": "x" * 1022}},
        HeadersTooLarge,
        id="the names of headers count",
    ),
    pytest.param({"headers": {"n" * 256: "x"}}, HeaderInvalid, id="a header's name of 256 characters"),
    pytest.param({"headers": {"a b": "x"}}, HeaderInvalid, id="a space in a header's name"),
    pytest.param({"headers": {"a": "x\r\ny: z"}}, HeaderInvalid, id="a line break in a header's value"),
    *(
        pytest.param({"headers": {name: "x"}}, HeaderInvalid, id=f"the reserved name {name}")
        for name in (
            *("CC", "BCC", "outbox-attempt", "x-opt-mine", "x-death", "x-first-death-queue"),
            *("x-outbox-tracking-ids", "x-original-routing-key"),
        )
    ),
    pytest.param({"routing_key": "k" * 256}, RoutingKeyInvalid, id="a routing key of 256 bytes"),
    pytest.param({"routing_key": "é" * 128}, RoutingKeyInvalid, id="a routing key is counted in bytes"),
    pytest.param({"routing_key": ""}, RoutingKeyInvalid, id="an empty routing key"),
    pytest.param({"key": "k" * 256}, KeyInvalid, id="a key of 256 bytes"),
    pytest.param({"key": ""}, KeyInvalid, id="an empty key"),
    pytest.param({"timer_id": "t" * 256}, TimerIdInvalid, id="a timer id of 256 bytes"),
    pytest.param({"timer_id": ""}, TimerIdInvalid, id="an empty timer id"),
    pytest.param({"content_type": "x" * 256}, HeaderInvalid, id="a content type of 256 characters"),
    pytest.param({"content_type": "text/plain\n"}, HeaderInvalid, id="a line break in a content type"),
    pytest.param({"eta": timedelta(days=36_526)}, TimeInvalid, id="due in more than a hundred years"),
    pytest.param({"expiration": 0}, TimeInvalid, id="an expiration of nothing"),
    pytest.param({"expiration": -1}, TimeInvalid, id="a negative expiration"),
    pytest.param(
        {"eta": datetime(9998, 12, 31, 23, 59, 59, tzinfo=UTC), "expiration": timedelta(days=1)},
        TimeInvalid,
        id="an expiration in the year 9999",
    ),
    pytest.param({"eta": datetime(9999, 1, 1, tzinfo=UTC)}, TimeInvalid, id="due in the year 9999"),
]


@pytest.mark.parametrize("options", AT_THE_LIMIT)
def test_a_message_at_the_limit_is_stored(emitting: Any, options: dict[str, Any]) -> None:
    assert emitting.emit(**options) is not None
    assert emitting.stored() == 1


@pytest.mark.parametrize(("options", "error"), BEYOND)
def test_a_message_beyond_a_limit_is_refused_before_any_statement(
    emitting: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(MessageError) as caught:
        emitting.emit(**options)
    assert type(caught.value) is error
    assert emitting.statements == []
    assert len(str(caught.value)) < 1000, "an error is read by people"


@pytest.mark.parametrize(("options", "error"), BEYOND)
async def test_an_async_caller_gets_the_same_refusal_before_its_session_is_touched(
    emitting: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    untouched: Any = object()  # anything that touched it would raise TransactionError
    arguments = {"routing_key": "order.created", "body": None} | options
    with pytest.raises(error):
        await emitting.outbox.emit(untouched, arguments.pop("routing_key"), arguments.pop("body"), **arguments)


def test_one_bad_body_among_many_keeps_all_of_them_from_being_written(emitting: Any) -> None:
    with emitting.engine.begin() as connection, pytest.raises(BodyNotJson):
        emitting.outbox.emit_many_sync(connection, "user.imported", [{"id": 1}, {"id": float("inf")}, {"id": 3}])
    assert emitting.statements == []


def test_the_largest_body_is_a_setting(emitting: Any) -> None:
    emitting.outbox.setup(db_engine=emitting.engine, max_body_size=10)
    assert emitting.emit(body=b"x" * 10) is not None
    with pytest.raises(BodyTooLarge, match="max_body_size"):
        emitting.emit(body=b"x" * 11)
    assert emitting.stored() == 1


def test_a_refused_message_leaves_the_callers_transaction_as_it_was(emitting: Any) -> None:
    with emitting.engine.begin() as connection:
        emitting.outbox.emit_sync(connection, "order.created", {"id": 1})
        with pytest.raises(RoutingKeyInvalid):
            emitting.outbox.emit_sync(connection, "", {"id": 2})
        emitting.outbox.emit_sync(connection, "order.created", {"id": 3})
    assert emitting.stored() == 2


# Only what is received may have a bad id, or be no CloudEvent: whoever emits gets both from us.
@pytest.mark.parametrize(
    "error",
    sorted(set(MessageError.__subclasses__()) - {MessageIdInvalid, CloudEventInvalid}, key=attrgetter("__name__")),
)
def test_each_limit_has_an_error_of_its_own(error: type[MessageError]) -> None:
    assert any(case.values[1] is error for case in BEYOND)
    assert issubclass(error, OutboxError)
    assert issubclass(error, ValueError)
    assert not issubclass(error, ConfigurationError)
