"""The logging observer: events as log records. Bodies are never logged."""

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import pytest
from sqlalchemy.exc import OperationalError

from outbox import Message, Outbox
from outbox.core.attempt import Attempt, Dead, Done, Reason, Released, RetryIn
from outbox.core.backoff import DATABASE
from outbox.core.binding import Binding
from outbox.core.events import (
    Advised,
    Bound,
    CircuitClosed,
    CircuitOpened,
    CleanedUp,
    Conflicted,
    Emitted,
    Event,
    Failed,
    Handled,
    HookFailed,
    LeaseWasLost,
    Received,
    Recovered,
    Relayed,
    RequestDeclined,
    Routed,
    SlotInUse,
    SlotTaken,
    Started,
    StillRunning,
    Stopped,
    Troubled,
    Unbound,
    Unroutable,
    Unsettled,
)
from outbox.observers.logging import LoggingObserver, Observers

CANARY = "c4n4ry-in-the-body"
MESSAGE = Message(
    routing_key="order.created",
    body=CANARY.encode(),
    headers={"secret": CANARY},
    key=CANARY,
    tracking_ids=("entry", "message-1"),
)
ATTEMPT = Attempt(MESSAGE, 2, 7)
SHORT = timedelta(milliseconds=12)
LONG_ERROR = "ValueError: it broke\n\n  File somewhere\n  in the middle"

CASES: list[Any] = [
    pytest.param(Emitted([MESSAGE]), logging.INFO, ["emitted", "order.created", "message-1"], id="emitted"),
    pytest.param(Routed("billing", 3), logging.DEBUG, ["routed", "3", "billing"], id="routed"),
    pytest.param(Unroutable("order.lost", 2), logging.WARNING, ["order.lost", "2", "unroutable="], id="unroutable"),
    pytest.param(Received("billing", 3, duplicates=2), logging.DEBUG, ["stored", "3", "billing", "2"], id="received"),
    pytest.param(RequestDeclined(401, "no\nsecret"), logging.INFO, ["declined", "401", "no"], id="declined"),
    pytest.param(RequestDeclined(503, "too many"), logging.WARNING, ["503", "too many"], id="not now"),
    pytest.param(Received("bills", 0, unwanted=1), logging.WARNING, ["1", "bills", "dead"], id="unwanted"),
    pytest.param(Relayed(ATTEMPT, Done()), logging.INFO, ["sent", "order.created", "message-1"], id="sent"),
    pytest.param(
        Relayed(ATTEMPT, RetryIn(timedelta(seconds=5), LONG_ERROR)),
        logging.WARNING,
        ["not sent", "message-1", "5s", "it broke"],
        id="not sent",
    ),
    pytest.param(
        Relayed(ATTEMPT, Dead(Reason.REFUSED, LONG_ERROR)),
        logging.WARNING,
        ["dead", "refused", "message-1", "it broke"],
        id="refused",
    ),
    pytest.param(Relayed(ATTEMPT, Released()), logging.DEBUG, ["gave back", "message-1"], id="relay gave back"),
    pytest.param(
        Handled("billing", ATTEMPT, Done(), SHORT), logging.INFO, ["handled", "message-1", "billing", "12ms"], id="done"
    ),
    pytest.param(
        Handled("billing", ATTEMPT, RetryIn(timedelta(minutes=1), LONG_ERROR), SHORT, ValueError()),
        logging.WARNING,
        ["attempt 2", "order.created", "billing", "1m", "it broke"],
        id="retry",
    ),
    pytest.param(
        Handled("billing", ATTEMPT, Dead(Reason.EXHAUSTED, LONG_ERROR), SHORT),
        logging.WARNING,
        ["dead", "exhausted", "billing", "it broke"],
        id="dead",
    ),
    pytest.param(
        Handled("billing", ATTEMPT, Dead(Reason.UNDECODABLE, LONG_ERROR), SHORT),
        logging.ERROR,
        ["dead", "undecodable", "billing", "it broke"],
        id="undecodable",
    ),
    pytest.param(Bound(Binding("billing", "order.*")), logging.DEBUG, ["billing", "order.*"], id="bound"),
    pytest.param(Unbound(Binding("billing", "order.*")), logging.INFO, ["billing", "order.*"], id="unbound"),
    pytest.param(
        Conflicted("billing", ATTEMPT, 2, OSError("could not serialize"), timedelta(milliseconds=20)),
        logging.INFO,
        ["run 2", "order.created", "billing", "20ms", "could not serialize"],
        id="conflicted",
    ),
    pytest.param(
        StillRunning("billing", ATTEMPT, timedelta(minutes=16)),
        logging.WARNING,
        ["order.created", "billing", "16m"],
        id="still running",
    ),
    pytest.param(
        Handled("billing", ATTEMPT, Released(), SHORT), logging.DEBUG, ["gave back", "billing"], id="worker gave back"
    ),
    pytest.param(
        LeaseWasLost("terminal", 7, "billing", 2),
        logging.WARNING,
        ["lease lost", "7", "billing", "terminal"],
        id="lost",
    ),
    pytest.param(
        Unsettled("billing", ATTEMPT, Done()), logging.DEBUG, ["message-1", "billing", "comes again"], id="unsettled"
    ),
    pytest.param(CleanedUp("inbox", 40), logging.DEBUG, ["cleaned up", "40", "inbox"], id="cleaned up"),
    pytest.param(Started("worker", "transport database"), logging.INFO, ["worker", "database"], id="started"),
    pytest.param(SlotTaken("shop_slot", 2048), logging.INFO, ["shop_slot", "2.0 KiB"], id="slot taken"),
    pytest.param(
        SlotInUse("shop_slot", "active for PID 7\nby another"), logging.INFO, ["shop_slot", "PID 7"], id="slot in use"
    ),
    pytest.param(Stopped("relay"), logging.INFO, ["relay", "stopped"], id="stopped"),
    pytest.param(
        Failed("relay", OSError("closed\nfor good")), logging.ERROR, ["relay", "ended by itself"], id="failed"
    ),
    pytest.param(Stopped("worker", 2), logging.WARNING, ["stopped", "2", "abandoned"], id="abandoned"),
    pytest.param(
        CircuitOpened("https://shop.example", "refused\nby all", timedelta(seconds=2)),
        logging.ERROR,
        ["https://shop.example", "takes nothing", "2s", "refused"],
        id="circuit opened",
    ),
    pytest.param(CircuitClosed(None), logging.INFO, ["the destination", "answers again"], id="circuit closed"),
    pytest.param(
        HookFailed("send_mail", OSError("no paper")), logging.ERROR, ["send_mail", "OSError", "no paper"], id="hook"
    ),
    pytest.param(Advised("topology", "delete it\nsoon"), logging.WARNING, ["topology", "delete it"], id="advised"),
    pytest.param(
        Troubled("relay", ConnectionError("away"), timedelta(seconds=2)),
        logging.ERROR,
        ["relay", "ConnectionError", "away", "2s"],
        id="troubled",
    ),
    pytest.param(
        Recovered("relay", ConnectionError("away"), timedelta(seconds=16), DATABASE),
        logging.WARNING,
        ["the database", "answers again"],
        id="recovered",
    ),
]


def records(caplog: pytest.LogCaptureFixture, event: Event) -> list[logging.LogRecord]:
    log = LoggingObserver()
    with caplog.at_level(logging.DEBUG, logger="outbox"):
        if isinstance(event, Recovered):
            log(Troubled(event.where, event.error, SHORT, event.outage_of))
            caplog.clear()
        log(event)
    return caplog.records


@pytest.mark.parametrize(("event", "level", "words"), CASES)
def test_an_event_is_one_line_at_its_level(
    caplog: pytest.LogCaptureFixture, event: Event, level: int, words: list[str]
) -> None:
    [record] = records(caplog, event)
    text = record.getMessage()
    assert (record.name, record.levelno) == ("outbox", level)
    assert [word for word in words if word not in text] == []
    assert "\n" not in text


@pytest.mark.parametrize(("event", "level", "words"), CASES)
def test_no_line_holds_a_body_a_header_or_a_key(
    caplog: pytest.LogCaptureFixture, event: Event, level: int, words: list[str]
) -> None:
    [record] = records(caplog, event)
    assert CANARY not in record.getMessage()
    assert CANARY not in str(vars(record))


def test_every_event_there_is_has_a_line() -> None:
    assert {type(case.values[0]) for case in CASES} == set(get_args(Event))


def test_a_batch_of_messages_is_a_line_for_each(caplog: pytest.LogCaptureFixture) -> None:
    messages = [Message(routing_key="order.created", body=b"") for _ in range(3)]
    lines = [record.getMessage() for record in records(caplog, Emitted(messages))]
    assert [message.id for message in messages] == [line.split()[-1] for line in lines]


def test_nothing_is_written_below_the_level_that_is_set(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="outbox"):
        for event in (Emitted([MESSAGE]), Handled("billing", ATTEMPT, Done(), SHORT), Routed("billing", 1)):
            LoggingObserver()(event)
    assert caplog.records == []


def test_a_lost_lease_carries_its_facts_for_whoever_collects_logs(caplog: pytest.LogCaptureFixture) -> None:
    [record] = records(caplog, LeaseWasLost("retry", 7, "billing", 2))
    facts = {name: getattr(record, name) for name in ("event", "phase", "row_id", "queue", "deliveries_count")}
    assert facts == {
        "event": "lease_lost",
        "phase": "retry",
        "row_id": 7,
        "queue": "billing",
        "deliveries_count": 2,
    }


def test_the_parameters_of_a_statement_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    error = OperationalError("INSERT INTO outbox_table (body) VALUES (?)", {"body": CANARY}, OSError("disk full"))
    assert CANARY in str(error)
    [record] = records(caplog, Troubled("relay", error, SHORT))
    assert CANARY not in record.getMessage()
    assert "disk full" in record.getMessage()


def test_an_error_of_a_megabyte_is_a_short_line(caplog: pytest.LogCaptureFixture) -> None:
    [record] = records(caplog, Troubled("relay", OSError("x" * 1_000_000), SHORT))
    assert len(record.getMessage()) < 1000


@pytest.mark.parametrize("text", ["first\rforged line", "\x1b[2Jcleared", "bell\x07", "first\x0bforged"])
def test_an_error_cannot_forge_lines_or_colours(caplog: pytest.LogCaptureFixture, text: str) -> None:
    [record] = records(caplog, Troubled("relay", OSError(text), SHORT))
    assert record.getMessage().isprintable()


def test_the_library_installs_no_handler_of_its_own() -> None:
    assert logging.getLogger("outbox").handlers == []
    assert logging.getLogger("outbox").level == logging.NOTSET


def test_an_observer_that_fails_is_logged_and_stops_neither_the_others_nor_the_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[Event] = []

    def failing(event: Event) -> None:
        raise RuntimeError("no metrics today")

    event = Routed("billing", 1)
    with caplog.at_level(logging.ERROR, logger="outbox"):
        Observers([heard.append, failing, heard.append])(event)
    assert heard == [event, event]
    [record] = caplog.records
    assert "failing" in record.getMessage()
    assert record.exc_info is not None


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        pytest.param({}, 1, id="beside the log"),
        pytest.param({"observers": [LoggingObserver()]}, 1, id="one that is the log itself"),
        pytest.param({"log": False}, 0, id="the log is switched off"),
    ],
)
async def test_observers_are_added_to_the_log_which_is_switched_off_by_its_name(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, options: dict[str, Any], lines: int
) -> None:
    heard: list[Event] = []
    observers = [*options.pop("observers", ()), heard.append]
    outbox = Outbox(db_engine_url=f"sqlite+aiosqlite:///{tmp_path}/log.db", observers=observers, **options)
    with caplog.at_level(logging.INFO, logger="outbox"):
        async with outbox.transaction() as session:
            await outbox.emit(session, "order.created", {})
    await outbox.close()
    assert [type(event) for event in heard] == [Emitted]
    assert [record.getMessage().split()[0] for record in caplog.records] == ["emitted"] * lines


def test_without_observers_nothing_is_told_and_nothing_breaks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="outbox"):
        Observers([])(Routed("billing", 1))
    assert caplog.records == []
