"""Messages as AMQP properties: everything comes back as it was, and what others wrote is carried on byte by byte."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands
from pamqp.header import ContentHeader

from outbox.core.attempt import Attempt, Dead, Reason
from outbox.core.errors import Undecodable
from outbox.core.history import LONGEST_HISTORY
from outbox.core.message import Message
from outbox.transports.rabbitmq.channel import Incoming
from outbox.transports.rabbitmq.copies import after_failure, of_dead_letter
from outbox.transports.rabbitmq.dead_letters.letter import read
from outbox.transports.rabbitmq.envelope import Envelope
from outbox.transports.rabbitmq.headers import ATTEMPT, MOST_COUNTED, Unsendable
from outbox.transports.rabbitmq.sending import encoded
from outbox.transports.rabbitmq.topology import LONGEST_DELAY

NAMES = st.text("abcdefgXYZ-_.019", min_size=1, max_size=40).filter(
    lambda name: not name.startswith(("outbox-", "x-")) and name not in ("CC", "BCC")
)
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=60)
BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)
# pamqp takes what lies further away for milliseconds.
MOMENTS = st.timedeltas(timedelta(0), timedelta(days=365 * 130)).map(lambda since: BEGINNING + since)
MESSAGES = st.builds(
    Message,
    routing_key=st.text("abc.", min_size=1, max_size=40),
    body=st.binary(max_size=50),
    content_type=st.sampled_from(["application/json", "text/plain; charset=utf-8"]),
    headers=st.dictionaries(NAMES, TEXTS, max_size=5),
    key=st.none() | st.text("key", min_size=1, max_size=20),
    tracking_ids=st.lists(st.text("id-0", min_size=1, max_size=36), min_size=1, max_size=4).map(tuple),
    created_at=MOMENTS,
    expires_at=st.none() | MOMENTS,
)


def as_pamqp_reads(properties: bytes) -> commands.Basic.Properties:
    header = ContentHeader()
    header.unmarshal(b"\x00" * 12 + properties)
    return header.properties


def written(**properties: Any) -> bytes:
    """Properties as another publisher writes them."""
    return commands.Basic.Properties(**properties).marshal()


@given(MESSAGES)
def test_a_message_comes_back_as_it_was(message: Message) -> None:
    envelope = Envelope.read(encoded(message))
    assert envelope.message(message.routing_key, message.body) == message
    assert (envelope.attempt_count, envelope.crashes, envelope.returned) == (1, None, 0)


@given(MESSAGES)
def test_others_read_what_is_written(message: Message) -> None:
    properties = as_pamqp_reads(encoded(message))
    assert (properties.message_id, properties.content_type) == (message.id, message.content_type)
    assert properties.delivery_mode == 2
    assert properties.timestamp == message.created_at.replace(microsecond=0)
    headers: dict[str, Any] = {**(properties.headers or {})}
    assert headers.items() >= dict(message.headers).items()
    assert json.loads(headers["x-outbox-tracking-ids"]) == list(message.tracking_ids)
    assert headers.get("outbox-tracking-ids", [message.id]) == list(message.tracking_ids)


def test_a_message_that_expires_has_a_time_to_live_until_then_and_not_less() -> None:
    for number in range(20):
        expires_at = datetime.now(UTC) + timedelta(seconds=5, microseconds=37 * number)
        properties = as_pamqp_reads(encoded(Message(routing_key="k", body=b"", expires_at=expires_at)))
        time_to_live = timedelta(milliseconds=int(properties.expiration or ""))
        assert time_to_live <= timedelta(seconds=5.1)
        assert datetime.now(UTC) + time_to_live >= expires_at


@pytest.mark.parametrize(
    ("left", "time_to_live"),
    [
        (None, None),
        (timedelta(seconds=-5), "0"),
        (LONGEST_DELAY + timedelta(minutes=1), None),  # more than the broker takes: the worker knows when it is over
    ],
)
def test_a_time_to_live_is_one_that_the_broker_takes_or_none(left: timedelta | None, time_to_live: str | None) -> None:
    message = Message(routing_key="k", body=b"", expires_at=None if left is None else datetime.now(UTC) + left)
    assert as_pamqp_reads(encoded(message)).expiration == time_to_live


@given(MESSAGES)
def test_a_copy_carries_everything_on(message: Message) -> None:
    first = Envelope.read(encoded(message))
    copy = Envelope.read(first.carried_on(message.routing_key, message, {ATTEMPT: 2}))
    assert copy.message("the.queue", message.body) == message
    assert copy.attempt_count == 2


def test_what_other_publishers_wrote_is_carried_on_and_what_the_broker_wrote_is_not() -> None:
    odd = {
        "n": 1,
        "pi": 3.5,
        "no": None,
        "yes": True,
        "d": Decimal("1.5"),
        "raw": bytearray(b"\xff"),
        "l": [1, {"a": "b"}],
    }
    brokers = {
        "x-death": [{"queue": "q", "count": 3}],
        "x-delivery-count": 2,
        "x-first-death-queue": "q",
        "CC": ["other"],
    }
    original = written(
        headers={**odd, **brokers},
        correlation_id="c",
        reply_to="r",
        message_type="t",
        app_id="a",
        priority=4,
        content_encoding="gzip",
        user_id="somebody",
        expiration="1000",
        timestamp=datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC),
    )
    envelope = Envelope.read(original)
    message = envelope.message("some.key", b"body")
    copy = as_pamqp_reads(envelope.carried_on("some.key", message, {}))
    assert copy.headers == {**odd, "outbox-routing-key": "some.key", "x-original-routing-key": "some.key"}
    assert (copy.correlation_id, copy.reply_to, copy.message_type, copy.app_id) == ("c", "r", "t", "a")
    assert (copy.priority, copy.content_encoding, copy.delivery_mode) == (4, "gzip", 2)
    assert (copy.user_id, copy.expiration) == (None, None)
    assert copy.message_id == message.id


def test_a_foreign_message_becomes_one_of_ours() -> None:
    message = Envelope.read(written(headers={"n": 1, "l": [1], "s": "text"})).message("some.key", b"body")
    assert message.headers == {"n": "1", "l": "[1]", "s": "text"}
    assert (message.routing_key, message.body, message.content_type) == (
        "some.key",
        b"body",
        "application/octet-stream",
    )
    assert message.tracking_ids == (message.id,)
    assert Envelope.read(b"\x00\x00").message("k", b"").routing_key == "k"


def test_returns_are_counted_by_the_broker_and_of_two_counts_the_smaller_counts() -> None:
    assert Envelope.read(written(headers={"x-delivery-count": 2})).returned == 2
    assert Envelope.read(written(headers={"x-delivery-count": 1, "x-acquired-count": 4})).returned == 1
    assert Envelope.read(written(headers={"x-delivery-count": 9, "x-acquired-count": 4})).returned == 4
    assert Envelope.read(written(headers={"x-acquired-count": 4})).returned == 0
    assert Envelope.read(written(headers={"x-delivery-count": 9, "x-acquired-count": 4})).returned_at_most == 9
    assert Envelope.read(written(headers={"x-delivery-count": "mine"})).returned == 0


@pytest.mark.parametrize(
    "headers",
    [
        {"outbox-attempt": "2"},
        {"outbox-attempt": True},
        {"outbox-crashes": 1.5},
        {"outbox-created-at": "now"},
        {"outbox-expires-at": 2**62},
        {"outbox-key": 1},
        {"outbox-tracking-ids": "one"},
        {"outbox-tracking-ids": [1]},
        {"outbox-routing-key": ["a"]},
        {"x-outbox-tracking-ids": "one"},
        {"x-outbox-tracking-ids": '"one"'},
        {"x-outbox-tracking-ids": "[1]"},
        {"x-outbox-tracking-ids": '["\\ud800"]'},
        {"x-outbox-tracking-ids": "[" * 100_000},
        {"x-outbox-tracking-ids": 1},
        {"x-original-routing-key": 1},
    ],
)
def test_a_header_of_ours_with_a_strange_value_is_undecodable(headers: dict[str, Any]) -> None:
    envelope = Envelope.read(written(headers=headers))
    with pytest.raises(Undecodable, match=next(iter(headers))):
        envelope.message("k", b"")
        envelope.attempt_count, envelope.crashes  # noqa: B018


@pytest.mark.parametrize("ids", ['["first", "caus\\u00e9"]', ["first", "causé"]], ids=["text", "list"])
def test_tracking_ids_of_the_other_library_are_read_and_carried_on_under_both_names(ids: Any) -> None:
    first = Envelope.read(written(headers={"x-outbox-tracking-ids": ids}, message_id="new in every copy"))
    message = first.message("k", b"")
    assert (message.id, message.tracking_ids, message.headers) == ("causé", ("first", "causé"), {})
    copy = first.carried_on("k", message, {})
    headers: Any = as_pamqp_reads(copy).headers
    assert headers["outbox-tracking-ids"] == json.loads(headers["x-outbox-tracking-ids"]) == ["first", "causé"]
    assert Envelope.read(copy).message("q", b"").tracking_ids == message.tracking_ids


def test_of_two_lists_of_tracking_ids_ours_counts_and_an_empty_one_says_nothing() -> None:
    both = {"outbox-tracking-ids": ["a"], "x-outbox-tracking-ids": '["b"]'}
    assert Envelope.read(written(headers=both, message_id="m")).message("k", b"").tracking_ids == ("a", "m")
    empty = written(headers={"x-outbox-tracking-ids": "[]"}, message_id="m")
    assert Envelope.read(empty).message("k", b"").tracking_ids == ("m",)
    alone = Envelope.read(written(headers={"x-outbox-tracking-ids": '["a"]'}, message_id="m"))
    message = alone.message("k", b"")
    copy = Envelope.read(alone.carried_on("k", message, {})).message("q", b"")
    assert copy.tracking_ids == message.tracking_ids == ("a",)


def test_rows_with_headers_that_were_not_reserved_then_are_sent_without_them() -> None:
    old = Message(routing_key="k", body=b"", headers={"x-outbox-tracking-ids": "mine", "x-original-routing-key": "a"})
    headers: Any = as_pamqp_reads(encoded(old)).headers
    assert json.loads(headers["x-outbox-tracking-ids"]) == [old.id]
    assert "x-original-routing-key" not in headers


@given(st.binary(max_size=60))
def test_no_bytes_do_more_than_be_undecodable(data: bytes) -> None:
    try:
        envelope = Envelope.read(data)
        message = envelope.message("k", b"")
        envelope.attempt_count, envelope.crashes, envelope.returned, envelope.history  # noqa: B018
        envelope.carried_on("k", message, {})
    except Undecodable:
        pass


@pytest.mark.parametrize("name", ["CC", "BCC", "x-death", "x-delivery-count", "x-first-death-queue", "outbox-attempt"])
def test_headers_that_mean_something_to_the_broker_or_to_us_are_not_sent(name: str) -> None:
    with pytest.raises(Unsendable, match=name):
        encoded(Message(routing_key="k", body=b"", headers={name: "v"}))


def test_an_id_that_does_not_fit_is_not_sent() -> None:
    with pytest.raises(Unsendable):
        encoded(Message(routing_key="k", body=b"", tracking_ids=("x" * 256,)))


def test_a_history_grows_by_a_line_and_forgets_its_beginning() -> None:
    message = Message(routing_key="k", body=b"")
    envelope = Envelope.read(encoded(message))
    for count in range(1, 40):
        headers = after_failure(Attempt(message, count), envelope, "boom " + "é" * 900 + "\nsecond line")
        envelope = Envelope.read(envelope.carried_on("k", message, headers))
    assert envelope.attempt_count == 40
    assert "attempt 39 failed: boom" in envelope.history
    assert "second line" not in envelope.history
    assert len(envelope.history.encode()) <= LONGEST_HISTORY


def test_a_dead_letter_says_why_and_its_next_copy_does_not() -> None:
    message = Message(routing_key="k", body=b"")
    envelope = Envelope.read(encoded(message))
    headers = of_dead_letter(Attempt(message, 3), envelope, "orders", Dead(Reason.REJECTED, "no\x00 thanks"))
    letter = Envelope.read(envelope.carried_on("k", message, headers))
    seen: dict[str, Any] = as_pamqp_reads(envelope.carried_on("k", message, headers)).headers or {}
    assert (seen["outbox-reason"], seen["outbox-queue"], seen["outbox-attempt"]) == ("rejected", "orders", 3)
    assert seen["outbox-error"] == "no\ufffd thanks"
    assert timedelta(0) <= datetime.now(UTC) - datetime.fromtimestamp(seen["outbox-died-at"] / 1e6, UTC)
    assert not {"outbox-reason", "outbox-error"} & set(
        as_pamqp_reads(letter.carried_on("k", message, {})).headers or {}
    )


def test_a_dead_letter_that_comes_back_has_all_its_attempts_before_it_and_no_expiration() -> None:
    message = Message(routing_key="k", body=b"", key="a", expires_at=datetime.now(UTC))
    envelope = Envelope.read(encoded(message))
    headers = of_dead_letter(Attempt(message, 3, crash_count=2), envelope, "orders", Dead(Reason.CRASHED, "died"))
    letter = Envelope.read(envelope.carried_on("k", message, headers))
    assert letter.is_dead_letter
    revived = letter.revived()
    assert not revived.is_dead_letter
    assert (revived.attempt_count, revived.crashes) == (1, None)
    assert revived.message("orders", b"") == replace(message, expires_at=None)
    assert "attempt 3 was the last, crashed" in revived.history


PRIVATE: dict[str, Any] = {
    "outbox-routing-key": "payments.refund",
    "x-original-routing-key": "payments.refund",
    "outbox-attempt": 7,
    "outbox-crashes": 0,
    "outbox-on-trial": True,
    "outbox-history": "forged",
    "outbox-queue": "q",
    "outbox-reason": "exhausted",
    "outbox-error": "forged",
    "outbox-died-at": 1,
}


def delivered(
    exchange: str, headers: dict[str, Any], *, redelivered: bool = False, counts_acquired: bool = False
) -> Envelope:
    incoming = Incoming(1, redelivered, exchange, "some.key", "", written(headers=headers), b"")
    return Envelope.of(incoming, counts_acquired=counts_acquired)


def test_what_a_stranger_says_of_a_messages_past_is_ignored_and_not_carried_on() -> None:
    envelope = delivered("outbox", {"color": "red", **PRIVATE})
    message = envelope.message("some.key", b"")
    assert (message.routing_key, message.headers) == ("some.key", {"color": "red"})
    assert (envelope.attempt_count, envelope.crashes, envelope.history) == (1, None, "")
    assert not envelope.on_trial
    assert not envelope.is_dead_letter
    copy = as_pamqp_reads(envelope.carried_on("some.key", message, {})).headers
    assert copy == {"color": "red", "outbox-routing-key": "some.key", "x-original-routing-key": "some.key"}


def test_what_came_by_the_default_exchange_is_believed() -> None:
    envelope = delivered("", PRIVATE)
    assert envelope.message("the.queue", b"").routing_key == "payments.refund"
    assert (envelope.attempt_count, envelope.crashes, envelope.history) == (7, 0, "forged")
    assert envelope.on_trial
    assert envelope.is_dead_letter
    of_the_other_library = delivered("", {"x-original-routing-key": "order.process"})
    assert of_the_other_library.message("the.queue", b"").routing_key == "order.process"


def test_returns_count_only_where_the_broker_says_that_there_was_one() -> None:
    assert delivered("outbox", {"x-delivery-count": 5}).returned == 0
    assert delivered("outbox", {"x-delivery-count": 5}, redelivered=True).returned == 5
    assert delivered("outbox", {"x-delivery-count": 2**63 - 1}, redelivered=True).returned == MOST_COUNTED


def test_an_acquired_count_is_believed_where_the_broker_writes_one() -> None:
    both = {"x-delivery-count": 5, "x-acquired-count": 1}
    assert delivered("outbox", both, redelivered=True, counts_acquired=True).returned == 1
    assert delivered("outbox", both, redelivered=True).returned == 5
    assert delivered("outbox", both, counts_acquired=True).returned == 0


def test_of_a_dead_letter_the_larger_count_counts_because_its_queue_may_limit_that_one() -> None:
    for counts in ({"x-delivery-count": 9, "x-acquired-count": 4}, {"x-delivery-count": 4, "x-acquired-count": 9}):
        incoming = Incoming(1, True, "outbox.dlx", "q", "", written(headers=counts), b"")
        assert read("q", "q", incoming, 1000).returned == 9


def test_two_ids_that_are_no_text_stay_two() -> None:
    ids = [Envelope.read(b"\x00\x80\x01" + byte).message("k", b"").id for byte in (b"\xff", b"\xfe")]
    assert ids == ["\\xff", "\\xfe"]


def test_a_count_that_has_reached_its_bound_stays_there_and_is_read_again() -> None:
    message = Message(routing_key="k", body=b"")
    envelope = Envelope.read(encoded(message))
    headers = after_failure(Attempt(message, MOST_COUNTED), envelope, "boom")
    assert Envelope.read(envelope.carried_on("k", message, headers)).attempt_count == MOST_COUNTED


def test_a_letter_that_is_replayed_without_its_history_begins_anew_all_the_same() -> None:
    large = {f"h{number:03}": "v" * 990 for number in range(115)}
    expired = {
        "outbox-attempt": 3,
        "outbox-expires-at": 1,
        "outbox-history": "line\n" * 3_270,
        "outbox-reason": "expired",
    }
    properties = written(headers={**large, **expired}, message_id="m")
    letter = read("q", "q", Incoming(1, False, "", "q", "", properties, b""), 1000)
    assert letter.dead.attempt_count == 3
    revived = Envelope.read(letter.revived() or b"")
    message = revived.message("q", b"")
    assert (message.expires_at, revived.attempt_count, revived.history) == (None, 1, "")
    assert message.headers == large
