"""Messages that strangers publish to RabbitMQ: each ends by itself, and no other message waits, repeats or dies for it.

A kind is one line in `KINDS`. Each kind is published for three listeners: one that handles it, one that fails and one
that rejects it. After each come ordinary messages, to the same queues and to another one.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from struct import pack
from typing import Any

import aio_pika
import pytest

from outbox import Listener, Message, Outbox, Reason, Reject
from outbox.core.events import Troubled
from outbox.core.message import LARGEST_BODY
from outbox.transports.rabbitmq.confirms import Outgoing
from outbox.transports.rabbitmq.dead_letters.browsing import Browse
from tests.support.observing import Recorder, eventually

from .amqp import Stranger, header, listed, nested, properties, stranger

ORDINARY = 15  # messages for each of the four queues after each kind
WITHIN = (
    15.0  # seconds in which those are handled: three times the 5 that are promised, as with all recovery times here
)
ROLES = ("handles", "fails", "rejects")
PLACES = (*ROLES, "innocent")

READ = "read"  # by its listener, which decides
UNDECODABLE = "undecodable"
EXPIRED = "expired"
TOO_LARGE = "too large for a copy"  # handled if its listener handles it; else the broker must carry it
REFUSED = "refused by the broker"

BIGGEST, SMALLEST = 2**63 - 1, -(2**63)
NOW = round(datetime.now(UTC).timestamp() * 1_000_000)


@dataclass(frozen=True)
class Kind:
    """What is published, and what must become of it. By the default exchange its own headers are believed."""

    fate: str
    table: bytes = b""
    by_default: bool = False
    body: bytes | None = None
    suffix: bytes = b""  # of the routing key
    others: dict[str, bytes] = field(default_factory=dict)  # properties


def short(text: str) -> bytes:
    return b"S" + pack(">I", len(text)) + text.encode()


def believed(fate: str, name: str, value: Any) -> Kind:
    return Kind(fate, header(name, value), by_default=True)


def ignored(name: str, value: Any) -> Kind:
    return Kind(READ, header(name, value))


LARGE = b"".join(header(f"h{n:03}", "v" * 990) for n in range(130)) + header("rest", "v" * 800)
LARGE_TOO = b"".join(header(f"h{n:03}", "v" * 990) for n in range(130)) + header("rest", "v" * 700)

KINDS = {
    "1500 nested lists": Kind(UNDECODABLE, header("h", nested(1500))),
    "1500 nested tables": Kind(UNDECODABLE, header("h", nested(1500, tables=True))),
    "30 nested lists": Kind(READ, header("h", nested(30))),
    "nested tracking ids": Kind(UNDECODABLE, header("outbox-tracking-ids", nested(1500))),
    "a nested x-death": Kind(READ, header("x-death", nested(1500))),
    "an x-death of text": Kind(READ, header("x-death", "mine")),
    "an x-death of texts": Kind(READ, header("x-death", ["mine"])),
    "an x-death and an id that is too long": Kind(
        UNDECODABLE, header("x-death", ["mine"]), others={"message_id": b"\xfe" * 255}
    ),
    "an id of 255 bytes that are no UTF-8": Kind(UNDECODABLE, others={"message_id": b"\xff" * 255}),
    "an id of 3 bytes that are no UTF-8": Kind(READ, others={"message_id": b"\xff\xfe\xfd"}),
    "an id with control characters": Kind(READ, others={"message_id": b"\0\n\x1b[2J"}),
    "an empty id": Kind(READ, others={"message_id": b""}),
    "an id of 255 bytes": Kind(READ, others={"message_id": b"i" * 255}),
    "a routing key that is no UTF-8": Kind(READ, suffix=b"\xff" * 200),
    "a correlation id that is no UTF-8": Kind(READ, others={"correlation_id": b"\xff" * 200}),
    "a content type that is no UTF-8": Kind(READ, others={"content_type": b"\xff" * 200}),
    "a text that is no UTF-8": Kind(READ, header("h", b"S" + pack(">I", 3) + b"\xff\xfe\xfd")),
    "a name that is no UTF-8": Kind(UNDECODABLE, header(b"\xff\xfe", "v")),
    "the most attempts, believed": believed(UNDECODABLE, "outbox-attempt", BIGGEST),
    "the most attempts": ignored("outbox-attempt", BIGGEST),
    "a million attempts, believed": believed(READ, "outbox-attempt", 1_000_000),
    "fewer attempts than none, believed": believed(UNDECODABLE, "outbox-attempt", SMALLEST),
    "attempts in words, believed": believed(UNDECODABLE, "outbox-attempt", "many"),
    "attempts in words": ignored("outbox-attempt", "many"),
    "no crashes": ignored("outbox-crashes", 0),
    "the most crashes": ignored("outbox-crashes", BIGGEST),
    "the most crashes, believed": believed(UNDECODABLE, "outbox-crashes", BIGGEST),
    "crashes in words, believed": believed(UNDECODABLE, "outbox-crashes", "many"),
    "on trial": ignored("outbox-on-trial", True),
    "another routing key": ignored("outbox-routing-key", "payments.refund"),
    "a routing key in a list, believed": believed(UNDECODABLE, "outbox-routing-key", ["a"]),
    "a number as history": ignored("outbox-history", 5),
    "a number as history, believed": believed(UNDECODABLE, "outbox-history", 5),
    "a long history, believed": believed(READ, "outbox-history", "line\n" * 20_000),
    "a reason": ignored("outbox-reason", "exhausted"),
    "a reason that is none, believed": believed(READ, "outbox-reason", "boredom"),
    "a death": ignored("outbox-died-at", SMALLEST),
    "an error and a queue": Kind(READ, header("outbox-error", 1) + header("outbox-queue", ["q"])),
    "a key of 1000 bytes": Kind(UNDECODABLE, header("outbox-key", "k" * 1000)),
    "a number as key": Kind(UNDECODABLE, header("outbox-key", 1)),
    "20 000 tracking ids": Kind(READ, header("outbox-tracking-ids", listed([short("i")] * 20_000))),
    "130 000 tracking ids of nothing": Kind(UNDECODABLE, header("outbox-tracking-ids", listed([b"V"] * 130_000))),
    "tracking ids of numbers": Kind(UNDECODABLE, header("outbox-tracking-ids", [1, 2])),
    "a tracking id of 1000 bytes": Kind(UNDECODABLE, header("outbox-tracking-ids", ["i" * 1000])),
    "tracking ids in nested JSON": Kind(UNDECODABLE, header("x-outbox-tracking-ids", "[" * 100_000)),
    "tracking ids in words": Kind(UNDECODABLE, header("x-outbox-tracking-ids", "many")),
    "half a character as tracking id": Kind(UNDECODABLE, header("x-outbox-tracking-ids", '["\\ud800"]')),
    "20 000 tracking ids in JSON": Kind(READ, header("x-outbox-tracking-ids", str(["i"] * 20_000).replace("'", '"'))),
    "another routing key, by its other name": ignored("x-original-routing-key", "payments.refund"),
    "made at the end of time": Kind(UNDECODABLE, header("outbox-created-at", BIGGEST)),
    "made before time began": Kind(UNDECODABLE, header("outbox-created-at", SMALLEST)),
    "made in the year 9999": Kind(UNDECODABLE, header("outbox-created-at", 253_402_300_799_000_000)),
    "due at the end of time": Kind(UNDECODABLE, header("outbox-due-at", BIGGEST)),
    "expires before time began": Kind(UNDECODABLE, header("outbox-expires-at", -1)),
    "expired long ago": Kind(EXPIRED, header("outbox-expires-at", 1)),
    "a time that is a text": Kind(UNDECODABLE, header("outbox-expires-at", "soon")),
    "a timestamp of the far future": Kind(READ, others={"timestamp": pack(">Q", 2**63)}),
    "the last timestamp": Kind(READ, others={"timestamp": b"\xff" * 8}),
    "a header with the last timestamp": Kind(UNDECODABLE, header("h", b"T" + b"\xff" * 8)),
    "a number that is none": Kind(REFUSED, header("h", float("nan"))),
    "a decimal with 255 digits": Kind(READ, header("h", b"D\xff\xff\xff\xff\xff")),
    "130 KB of headers": Kind(TOO_LARGE, LARGE),
    "130 KB of headers and an x-death": Kind(TOO_LARGE, LARGE_TOO + header("x-death", ["mine"])),
    "16 000 headers": Kind(READ, b"".join(header(f"{n:05}", b"V") for n in range(16_000))),
    "returned as often as can be": Kind(READ, header("x-delivery-count", BIGGEST)),
    "taken as often as can be": Kind(READ, header("x-acquired-count", BIGGEST)),
    "returned in words": Kind(READ, header("x-delivery-count", nested(1500))),
    "the highest priority": Kind(READ, others={"priority": b"\xff"}),
    "no body": Kind(READ, body=b""),
    "a body that is no number": Kind(READ, body=b'{"n": NaN}'),
    "a body that is too large, and an x-death": Kind(
        UNDECODABLE, header("x-death", ["mine"]), body=b"x" * (LARGEST_BODY + 1)
    ),
    "a body that is too large": Kind(UNDECODABLE, body=b"l" * (LARGEST_BODY + 1)),
    "a table that is cut off": Kind(REFUSED, header("h", b"S" + pack(">I", 1000) + b"short")),
    "a type that there is not": Kind(REFUSED, header("h", b"Z\0\0\0\0")),
}


def test_the_table_has_at_least_34_kinds() -> None:
    assert len(KINDS) >= 34


def body_of(name: str) -> bytes:
    body = KINDS[name].body
    return name.encode() if body is None else body


NAMES = {body_of(name): name for name in KINDS}


class Worker:
    """What its listeners were called for."""

    def __init__(self, connection: dict[str, Any]) -> None:
        self.calls: Counter[tuple[str, bytes]] = Counter()
        self.keys: dict[bytes, str] = {}
        self.recorder = Recorder()
        self.accepts = False
        self.outbox = Outbox(**connection, observers=[self.recorder], grace=5)
        self.listeners = [
            Listener(f"{place}.#", self._listener(place), queue=place, retry_delays=(0.05,)) for place in PLACES
        ]

    def _listener(self, place: str) -> Any:
        async def on_message(body: bytes, letter: Message) -> None:
            self.calls[place, body] += 1
            self.keys[body] = letter.routing_key
            if body.startswith(b"ordinary ") or self.accepts:
                return
            if place == "fails":
                raise ValueError("it fails")
            if place == "rejects":
                raise Reject("it is rejected")

        return on_message

    @property
    def handled(self) -> Counter[int]:
        """How many of the ordinary messages were handled so often."""
        return Counter(count for (_, body), count in self.calls.items() if body.startswith(b"ordinary "))

    async def letters(self) -> dict[str, dict[str, str]]:
        """By queue and kind: why it is dead."""
        found = {}
        for place in PLACES:
            letters = await self.outbox.dead_letters.list(queue=place, limit=1000)
            found[place] = {NAMES.get(each.message.body, repr(each.message.body)): str(each.reason) for each in letters}
        return found


@asynccontextmanager
async def running(url: str, how: str) -> AsyncIterator[Worker]:
    if how == "own":
        worker = Worker({"rabbitmq_url": url})
        async with worker.outbox.running(listeners=worker.listeners):
            yield worker
    else:
        async with await aio_pika.connect_robust(url) as given:
            worker = Worker({"rmq_connection": given})
            async with worker.outbox.running(listeners=worker.listeners):
                yield worker


def expected() -> dict[str, dict[str, str]]:
    """What lies where in the end."""
    dead: dict[str, dict[str, str]] = {place: {} for place in PLACES}
    for name, kind in KINDS.items():
        for role, otherwise in (("handles", None), ("fails", Reason.EXHAUSTED), ("rejects", Reason.REJECTED)):
            if kind.fate in (UNDECODABLE, EXPIRED):
                dead[role][name] = kind.fate
            elif otherwise is not None and kind.fate != REFUSED:
                dead[role][name] = UNDECODABLE if kind.fate == TOO_LARGE else str(otherwise)
    return dead


async def send_kinds(url: str, worker: Worker) -> None:
    """Each kind, and ordinary messages after it, which are handled in time."""
    refused = set()
    async with stranger(url) as publisher, stranger(url) as other:
        for number, (name, kind) in enumerate(KINDS.items()):
            for role in ROLES if kind.fate != REFUSED else ROLES[:1]:
                exchange = "" if kind.by_default else "outbox"
                key = role if kind.by_default else f"{role}.".encode() + (kind.suffix or b"odd")
                if not await publisher.publish(exchange, key, properties(kind.table, **kind.others), body_of(name)):
                    refused.add(name)
            began = time.monotonic()
            bodies = [f"ordinary {number} {n}".encode() for n in range(ORDINARY)]
            await send_ordinary(other, bodies)
            wanted = {(place, body) for place in PLACES for body in bodies}
            await eventually(lambda wanted=wanted: wanted <= worker.calls.keys())  # type: ignore[misc]
            assert time.monotonic() - began < WITHIN, name
    assert refused == {name for name, kind in KINDS.items() if kind.fate == REFUSED}


async def send_ordinary(publisher: Stranger, bodies: list[bytes]) -> None:
    made = header("outbox-created-at", NOW)
    await publisher.publish_all(
        [
            Outgoing("outbox", f"{place}.odd", properties(made, message_id=b"%s " % place.encode() + body), body, "")
            for body in bodies
            for place in PLACES
        ]
    )


@pytest.mark.parametrize("how", ["own", "given"])
async def test_no_kind_of_message_stops_repeats_or_kills_another(rabbitmq_url: str, how: str) -> None:
    async with running(rabbitmq_url, how) as worker:
        await send_kinds(rabbitmq_url, worker)
        assert await differences(worker) == []
        assert worker.handled == {1: ORDINARY * len(PLACES) * len(KINDS)}
        assert worker.recorder.of(Troubled) == []
        handled = {NAMES[body] for place, body in worker.calls if place == "handles" and body in NAMES}
        assert handled == {name for name, kind in KINDS.items() if kind.fate in (READ, TOO_LARGE)}
        assert {key.split(".")[0] for key in worker.keys.values()} <= {*PLACES}
        # A retry comes from its delay by the default exchange, and its attempt is believed: it is the last one.
        retried = [body_of(name) for name, kind in KINDS.items() if kind.fate == READ and not kind.by_default]
        assert {worker.calls["fails", body] for body in retried} == {2}
        await show_and_replay(worker, "handles")


FORGED = (
    header("outbox-reason", "exhausted")
    + header("outbox-error", "forged")
    + header("outbox-routing-key", "payments.refund")
    + header("x-original-routing-key", "payments.refund")
    + header("outbox-attempt", 7)
    + header("outbox-crashes", 3)
    + header("outbox-history", "forged")
    + header("outbox-queue", "payments")
    + header("outbox-died-at", 1)
)


def forged_death(reason: str, count: int) -> bytes:
    """As if the message had come by the default exchange, as retries do. RabbitMQ adds its own account to this one."""
    long_ago = datetime(2001, 1, 1, tzinfo=UTC)
    told: dict[str, object] = {"queue": "handles", "exchange": "", "reason": reason, "count": count, "time": long_ago}
    told["routing-keys"] = ["payments.refund"]
    return header("x-death", [told])


FORGED_DEATHS = {
    "e": b"",
    **{f"e{count}": forged_death("expired", count) for count in (0, 1, 5)},
    "er": forged_death("rejected", 1),
}


async def test_a_letter_that_the_broker_moved_itself_says_nothing_that_a_stranger_wrote_of_its_past(
    rabbitmq_url: str,
) -> None:
    """What expires in its queue, and what its worker can only reject."""
    too_large = b"l" * (LARGEST_BODY + 1)
    async with running(rabbitmq_url, "own") as worker:
        async with stranger(rabbitmq_url) as publisher:
            assert await publisher.publish("outbox", "handles.large", properties(FORGED, message_id=b"l"), too_large)
        await eventually(lambda: found(worker, 1))
    async with stranger(rabbitmq_url) as publisher:  # no worker is there to take it
        for id, death in FORGED_DEATHS.items():
            data = properties(FORGED + death, message_id=id.encode(), expiration=b"0")
            assert await publisher.publish("outbox", "handles.expiring", data, b"expiring")
    await eventually(lambda: found(worker, 1 + len(FORGED_DEATHS)))
    letters = {letter.message.id: letter for letter in await worker.outbox.dead_letters.list(queue="handles")}
    expired = dict.fromkeys(FORGED_DEATHS, Reason.EXPIRED)
    assert {id: letter.reason for id, letter in letters.items()} == {"l": Reason.UNDECODABLE, **expired}
    keys = {letter.message.routing_key for letter in letters.values()}
    assert keys == {"handles.large", "handles.expiring", "handles"}  # the queue's name where the real one is not told
    for letter in letters.values():
        assert (letter.queue, letter.attempt_count, letter.crash_count, letter.history) == ("handles", 1, 0, "")
        assert letter.died_at.year > 2000 and "forged" not in str(letter.error)
    await worker.outbox.close()


async def test_of_large_letters_few_are_read_at_once(rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Letters may be larger than any body that a worker takes: that is why they died."""
    monkeypatch.setattr(sys.modules[Browse.__module__], "STEP_BYTES", 50_000)
    take, steps = Browse._take, []

    async def taking(browse: Browse, wanted: int) -> None:
        steps.append(wanted)
        await take(browse, wanted)

    monkeypatch.setattr(Browse, "_take", taking)
    async with running(rabbitmq_url, "own") as worker:
        pass
    async with stranger(rabbitmq_url) as publisher:
        large = [Outgoing("", "handles.dlq", properties(message_id=b"%d" % n), bytes(5000), "") for n in range(140)]
        await publisher.publish_all(large)
    letters = worker.outbox.transport.dead_letters
    assert letters is not None
    await letters.deaths(timedelta(hours=1), known=["handles"])
    assert steps == [100, 10, 10, 10, 10]
    steps.clear()
    assert len(await worker.outbox.dead_letters.list(queue="handles", limit=50)) == 50
    assert steps[0] == 50 and max(steps[1:]) <= 10
    await worker.outbox.close()


async def found(worker: Worker, count: int) -> bool:
    return len(await worker.outbox.dead_letters.list(queue="handles")) == count


async def show_and_replay(worker: Worker, place: str) -> None:
    """None of the letters keeps the others from it, and each is handled or dead again."""
    letters = worker.outbox.dead_letters
    ids = {NAMES[letter.message.body]: letter.id for letter in await letters.list(queue=place, limit=1000)}
    for name in ("1500 nested lists", "an id of 255 bytes that are no UTF-8", "a body that is too large"):
        assert (await letters.show(ids[name])).reason == Reason.UNDECODABLE
    assert 0 < await letters.replay([*ids.values()]) <= len(ids)
    async with asyncio.timeout(WITHIN):
        while missing := {name for name in ids if not worker.calls[place, body_of(name)]}:
            if missing <= (await worker.letters())[place].keys():
                break


async def differences(worker: Worker) -> list[str]:
    """What became of each kind where it should be something else, at the latest when it should have happened."""
    wanted = expected()
    until = time.monotonic() + WITHIN
    while (found := await worker.letters()) != wanted and time.monotonic() < until:
        await asyncio.sleep(0.1)
    return [
        f"{place}: {name} is {found[place].get(name)}, not {wanted[place].get(name)}"
        for place in PLACES
        for name in {*found[place], *wanted[place]}
        if found[place].get(name) != wanted[place].get(name)
    ]
