"""Output: what a stranger writes into a message is shown, and neither forges a line nor steers a terminal."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiormq import spec

from outbox import Listener, Message, Outbox
from outbox.cli.exits import ExitCode
from outbox.cli.logs import FORMAT, JsonFormatter, PrintableFormatter
from outbox.core.attempt import Attempt, Dead, Reason, RetryIn
from outbox.core.durations import NO_DELAY
from outbox.core.events import CircuitOpened, Event, Handled, Unroutable
from outbox.core.printing import printable
from outbox.observers.logging import LoggingObserver
from outbox.transports.rabbitmq.topology import Names, Topology
from tests.support.amqp import channel_to, declare_at
from tests.support.broker import VirtualHost
from tests.support.commands import SOON, Command, until

# What some program takes for the end of a line, or has no shape of its own.
CHARACTERS = {
    "line feed": "\n",
    "carriage return": "\r",
    "both": "\r\n",
    "vertical tab": "\x0b",
    "form feed": "\x0c",
    "file separator": "\x1c",
    "record separator": "\x1e",
    "next line": "\x85",
    "line separator": "\u2028",
    "paragraph separator": "\u2029",
    "nul": "\x00",
    "backspace": "\x08",
    "escape": "\x1b[2J",
    "control sequence introducer": "\x9b2J",
    "operating system command": "\x1b]0;title\x07",
    "delete": "\x7f",
    "right to left override": "\u202e",
    "right to left isolate": "\u2067",
    "arabic letter mark": "\u061c",
    "zero width space": "\u200b",
    "zero width joiner": "\u200d",
    "byte order mark": "\ufeff",
    "soft hyphen": "\xad",
    "word joiner": "\u2060",
    "combining grapheme joiner": "\u034f",
    "hangul filler": "\u3164",
    "braille blank": "\u2800",
    "variation selector": "\ufe0f",
    "tag": "\U000e0041",
    "private use": "\ue000",
}
FORGED = "2026-01-01 00:00:00,000 INFO outbox: handled order.paid forged"
RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR) [\w.]+: ")


def hostile(number: int, character: str) -> str:
    return f"m{number}{character}{FORGED}"


def assert_harmless(text: str) -> None:
    """Line feeds are the only characters without a shape, and no line begins as the stranger wanted."""
    assert not [sign for sign in text if not sign.isprintable() and sign != "\n"]
    assert not [line for line in text.split("\n") if line.startswith(FORGED)]


@pytest.mark.parametrize("character", CHARACTERS.values(), ids=list(CHARACTERS))
def test_every_such_character_is_escaped_and_ordinary_text_is_not(character: str) -> None:
    shown = printable(f"a{character}b")
    assert shown.isprintable() and shown.startswith("a\\") and shown.endswith("b")
    for ordinary in ("order.created", "größer", "注文", "naïve café", "🙂", "a\\nb"):
        assert printable(ordinary) is ordinary


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What an application's own handler, with an ordinary formatter, writes of the library's records."""
    stream, logger = io.StringIO(), logging.getLogger("outbox")
    handler, level = logging.StreamHandler(stream), logger.level
    handler.setFormatter(logging.Formatter(FORMAT))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.mark.parametrize("character", CHARACTERS.values(), ids=list(CHARACTERS))
def test_a_record_of_the_library_is_one_line_whoever_formats_it(log: io.StringIO, character: str) -> None:
    text = hostile(1, character)
    attempt = Attempt(Message(routing_key=text, body=b"", tracking_ids=(text,)))
    events: list[Event] = [
        Handled(text, attempt, RetryIn(NO_DELAY, text), NO_DELAY),
        Handled(text, attempt, Dead(Reason.UNDECODABLE, text), NO_DELAY),
        CircuitOpened(text, text, NO_DELAY),
        Unroutable(text, 1),
    ]
    for event in events:
        LoggingObserver()(event)
    assert len(log.getvalue().splitlines()) == len(events)
    assert_harmless(log.getvalue())


@pytest.mark.parametrize("character", CHARACTERS.values(), ids=list(CHARACTERS))
def test_a_record_as_json_is_one_line_with_its_ids_as_fields_all_of_them_escaped(
    caplog: pytest.LogCaptureFixture, character: str
) -> None:
    text = hostile(1, character)
    attempt = Attempt(Message(routing_key=text, body=b"", tracking_ids=(text,)), 3)
    with caplog.at_level(logging.INFO, logger="outbox"):
        LoggingObserver()(Handled(text, attempt, Dead(Reason.REJECTED, text), NO_DELAY))
        logging.getLogger("outbox").warning("%s", text, extra={"order": text, text: float("nan"), "level": "forged"})
    first, second = [JsonFormatter().format(record) for record in caplog.records]
    found, others = json.loads(first), json.loads(second)
    assert first.isprintable() and second.isprintable()
    assert (found["event"], found["message_id"], found["routing_key"], found["queue"]) == (
        "handled",
        printable(text),
        printable(text),
        printable(text),
    )
    assert (found["level"], found["logger"], found["attempt"], found["reason"]) == ("WARNING", "outbox", 3, "rejected")
    assert (others["level"], others["order"], others[printable(text)]) == ("WARNING", printable(text), "nan")
    assert all(value.isprintable() for value in [*found.values(), *others.values()] if isinstance(value, str))


def test_a_traceback_on_stderr_is_indented_and_a_message_of_several_lines_is_one() -> None:
    try:
        raise ValueError(f"first\n{FORGED}\u2028{FORGED}")
    except ValueError as error:
        information = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("shop", logging.ERROR, __file__, 1, "an order\n%s", (FORGED,), information)
    first, *further = PrintableFormatter(FORMAT).format(record).split("\n")
    assert RECORD.match(first) and first.endswith(rf"an order\n{FORGED}")
    assert len(further) > 3 and all(line.startswith("  ") for line in further)
    assert rf"  {FORGED}\u2028{FORGED}" in further
    assert record.exc_text is not None and f"{FORGED}\u2028{FORGED}" in record.exc_text, (
        "other handlers get it as it was"
    )


SHOP = """
import logging

from outbox import Message, Reject, listen


@listen("#", queue="q")
async def listener(body, message: Message):
    if body == b"reject":
        raise Reject(message.id)
    if body == b"log":
        try:
            raise ValueError(message.id)
        except ValueError:
            logging.getLogger("shop").exception("order %s", message.id)
"""


@pytest.fixture
def command(tmp_path: Path, vhost: VirtualHost) -> Command:
    (tmp_path / "shop_of_strangers.py").write_text(SHOP)
    return Command(tmp_path, {"OUTBOX_TRANSPORT": vhost.url})


async def test_what_comes_from_a_broker_forges_nothing_in_a_workers_log_nor_on_a_screen(
    command: Command, vhost: VirtualHost
) -> None:
    """Ids and routing keys are whatever another publisher writes: they are not refused, they are escaped."""
    bodies = (b"handle", b"reject", b"log")
    needed = Topology.of(Names(), [Listener("#", print, queue="q")], [])
    await declare_at(vhost.url, needed)
    async with channel_to(vhost.url) as channel:
        for number, character in enumerate(CHARACTERS.values()):
            text = hostile(number, character)
            for body in bodies:
                properties = spec.Basic.Properties(message_id=text, content_type="application/octet-stream")
                await channel.basic_publish(body, exchange="outbox", routing_key=text, properties=properties)
    listed = ("dead-letters", "list", "--queue", "q", "--limit", "1000")
    with command.started("worker", "shop_of_strangers:listener") as worker:
        log = await asyncio.to_thread(read_until, worker, len(bodies) * len(CHARACTERS))
        worker.terminate()
        _, rest = await asyncio.to_thread(worker.communicate, timeout=SOON)
    log += rest
    assert_harmless(log)
    records = [line for line in log.rstrip("\n").split("\n") if not line.startswith("  ")]
    assert all(RECORD.match(line) for line in records)
    for number in range(len(CHARACTERS)):
        assert len([line for line in records if f" m{number}\\" in line]) >= len(bodies)
    screen = await command.run(*listed, "--body")
    assert_harmless(screen.stdout)
    assert len(screen.stdout.splitlines()) == 1 + len(CHARACTERS)
    assert screen.stdout.isprintable() is False and FORGED in screen.stdout
    for letter in (await command.run(*listed, "--json")).document["dead_letters"][:3]:
        shown = await command.run("dead-letters", "show", str(letter["id"]), "--body")
        assert_harmless(shown.stdout)


async def test_what_is_in_the_table_forges_nothing_either(tmp_path: Path) -> None:
    """Here control characters were refused by emit; what it takes is escaped."""
    url = f"sqlite:///{tmp_path / 'outbox.db'}"
    command = Command(tmp_path, {"OUTBOX_DB_ENGINE_URL": url})
    (tmp_path / "shop_of_strangers.py").write_text(SHOP)
    outbox = Outbox(db_engine_url=url, poll_interval=0.2)
    taken = [text for text in map(hostile, range(99), CHARACTERS.values()) if not re.search(r"[\x00-\x1f\x7f]", text)]
    async with outbox.transaction() as session:
        for text in taken:
            await outbox.emit(session, text, b"reject", key=text, headers={"x": text})
    shown = await command.run("messages", "list", "--body")
    with command.started("worker", "shop_of_strangers:listener") as worker:
        await until(lambda: buried(outbox, len(taken)))
        worker.terminate()
        _, log = await asyncio.to_thread(worker.communicate, timeout=SOON)
    [letter] = await outbox.dead_letters.list(limit=1)
    await outbox.close()
    assert_harmless(log)
    assert all(RECORD.match(line) for line in log.rstrip("\n").split("\n"))
    for ran in (
        shown,
        await command.run("status", "--interval", "0"),
        await command.run("doctor"),
        await command.run("dead-letters", "list", "--body"),
        await command.run("dead-letters", "show", str(letter.id), "--body"),
        await command.run("messages", "show", letter.message.id, "--body"),
    ):
        assert ran.code in (ExitCode.FINE, ExitCode.UNHEALTHY)  # to doctor, dead letters are a finding
        assert_harmless(ran.said)


def read_until(worker: subprocess.Popen[str], ends: int) -> str:
    """A worker's log until so many messages were handled or are dead."""
    assert worker.stderr is not None
    lines: list[str] = []
    while sum(bool(re.match(r"\S+ \S+ \w+ outbox: (handled|m\d+\\.* is dead)", line)) for line in lines) < ends:
        lines.append(worker.stderr.readline())
        assert lines[-1], "the worker ended"
    return "".join(lines)


async def buried(outbox: Outbox, count: int) -> bool:
    return len(await outbox.dead_letters.list(limit=1000)) == count
