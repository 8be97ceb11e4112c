"""Outages in the log: a line when one begins, one a minute, and one when it ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta

import pytest
from sqlalchemy.exc import OperationalError, ProgrammingError

from outbox import Message
from outbox.adapters import routes_for
from outbox.core.attempt import Attempt, Done
from outbox.core.backoff import DATABASE, TRANSPORT, Outage
from outbox.core.errors import TransportUnavailable
from outbox.core.events import CircuitClosed, CircuitOpened, Event, Recovered, Relayed, Troubled
from outbox.core.transport import Defaults
from outbox.observers.logging import LoggingObserver
from outbox.observers.outages import AFTERMATH, AGAIN_AFTER, Outages

SOON = timedelta(seconds=1)
AWAY = OperationalError("SELECT 1", {}, OSError("connection refused"))


class Denied(Exception):
    """As drivers tell it."""

    sqlstate = "42501"


REFUSED = ProgrammingError("DELETE", {}, Denied("permission denied"))


class Log:
    """A LoggingObserver whose clock is moved by hand."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.now = 1000.0
        self._caplog = caplog
        self._observer = LoggingObserver()
        self._observer._outages = Outages(lambda: self.now)

    def __call__(self, event: Event) -> None:
        self._observer(event)

    def lines(self) -> list[tuple[str, str]]:
        """What was logged since the last time."""
        found = [(record.levelname, record.getMessage()) for record in self._caplog.records]
        self._caplog.clear()
        return found


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[Log]:
    with caplog.at_level(logging.WARNING, logger="outbox"):
        yield Log(caplog)


def test_all_parts_that_miss_the_database_share_one_outage(log: Log) -> None:
    parts = [Outage(name, DATABASE, log) for name in ("relay", "cleanup", "worker of a", "worker of b")]
    for _ in range(10):
        for part in parts:
            part.struck(AWAY, SOON)
        log.now += 1.6
    [(level, text)] = log.lines()
    assert level == "ERROR" and text.startswith("relay: OperationalError:") and text.endswith("again in 1s")
    parts[1].over()
    assert log.lines() == [("WARNING", "the database answers again after 16s")]
    for part in parts:
        part.over()
    assert log.lines() == []


def test_a_long_outage_is_a_line_a_minute_which_says_for_how_long(log: Log) -> None:
    relay = Outage("relay", TRANSPORT, log)
    for _ in range(130):
        relay.struck(TransportUnavailable("away"), SOON)
        log.now += 1
    lines = log.lines()
    assert [level for level, _ in lines] == ["ERROR"] * 3
    assert [text.partition("again in 1s")[2] for _, text in lines] == ["", ", for 1m now", ", for 2m now"]


def test_a_late_error_of_an_outage_that_has_ended_is_no_new_one_and_a_later_one_is(log: Log) -> None:
    relay, worker = (Outage(name, DATABASE, log) for name in ("relay", "worker of a"))
    relay.struck(AWAY, SOON)
    relay.over()
    assert len(log.lines()) == 2
    log.now += AFTERMATH / 2
    worker.struck(AWAY, SOON)
    worker.over()
    assert log.lines() == []
    log.now += AFTERMATH
    worker.struck(AWAY, SOON)
    worker.over()
    assert [level for level, _ in log.lines()] == ["ERROR", "WARNING"]


def test_database_and_transport_are_apart_and_so_are_routes(log: Log) -> None:
    relay = Outage("relay", DATABASE, log)
    relay.struck(AWAY, SOON)
    Outage("RabbitMQ consumer", TRANSPORT, log).struck(ConnectionError("closed"), SOON)
    for name in ("https://a.example", "https://b.example"):
        log(CircuitOpened(name, "refused", SOON))
        log(CircuitOpened(name, "refused", SOON))
    assert len(log.lines()) == 4
    relay.over()
    assert log.lines() == [("WARNING", "the database answers again after 0ms")]


def test_a_database_that_answers_and_refuses_is_another_matter_for_each_part(log: Log) -> None:
    cleanup, relay = (Outage(name, DATABASE, log) for name in ("cleanup", "relay"))
    cleanup.struck(REFUSED, SOON)
    cleanup.struck(REFUSED, SOON)
    relay.struck(AWAY, SOON)
    assert [text.partition(":")[0] for _, text in log.lines()] == ["cleanup", "relay"]
    cleanup.over()
    assert [text for _, text in log.lines()] == ["cleanup works again after 0ms"]


def test_a_broker_that_answers_and_refuses_is_another_matter_for_each_part(log: Log) -> None:
    consumer, copies, link = (Outage(name, TRANSPORT, log) for name in ("consumer of a", "copies for b", "publisher"))
    consumer.struck(TransportUnavailable("no queue 'a'"), SOON, answered=True)
    log.now += 30
    for _ in range(2):
        copies.struck(TransportUnavailable("the queue takes no more"), SOON, answered=True)
        link.struck(TransportUnavailable("away"), SOON)
    assert [text.partition(":")[0] for _, text in log.lines()] == ["consumer of a", "copies for b", "publisher"]
    log.now += 5
    link.over()
    assert [text for _, text in log.lines()] == ["publisher works again after 5s"]
    consumer.over()
    copies.over()
    assert [text for _, text in log.lines()] == [
        "consumer of a works again after 35s",
        "copies for b works again after 5s",
    ]


def test_a_part_that_was_refused_and_then_cut_off_has_both_behind_it_when_it_works(log: Log) -> None:
    consumer = Outage("consumer of a", TRANSPORT, log)
    consumer.struck(TransportUnavailable("no queue 'a'"), SOON, answered=True)
    consumer.struck(TransportUnavailable("away"), SOON)
    assert len(log.lines()) == 2
    log.now += 5
    consumer.over()
    assert [text for _, text in log.lines()] == ["consumer of a works again after 5s"]
    log.now += AFTERMATH
    consumer.struck(TransportUnavailable("no queue 'a'"), SOON, answered=True)
    [(_, text)] = log.lines()
    assert text.endswith("again in 1s"), "a new one, and not the first for 15 s now"


async def test_an_outage_of_a_route_to_rabbitmq_is_one_line_under_its_own_name(log: Log) -> None:
    addresses = [f"amqp://127.0.0.1:{port}/" for port in (1, 2)]
    routes = routes_for({str(number): url for number, url in enumerate(addresses)}, Defaults(observe=log)).routes
    relays = [Outage(f"relay to {route.name}", route.name, log) for route in routes]
    for route, relay in zip(routes, relays, strict=True):
        await route.transport.open()  # nothing listens there
        relay.struck(TransportUnavailable("away"), SOON)
    lines = log.lines()
    assert [level for level, _ in lines] == ["ERROR", "ERROR"]
    for address, (_, text) in zip(addresses, lines, strict=True):
        assert text.startswith(f"RabbitMQ publisher of {address}: ")
    relays[0].over()
    assert [text for _, text in log.lines()] == [f"relay to {addresses[0]} works again after 0ms"]
    relays[1].over()
    assert [text for _, text in log.lines()] == [f"relay to {addresses[1]} works again after 0ms"]
    for route in routes:
        await route.transport.close()


def test_a_destination_is_a_line_when_it_is_left_alone_and_one_when_it_answers(log: Log) -> None:
    shop = "https://shop.example"
    for _ in range(5):
        log(CircuitOpened(shop, "refused", SOON))
        log.now += AGAIN_AFTER / 5 - 1
    log(CircuitClosed(shop))
    [(begins, _), (ends, text)] = log.lines()
    assert (begins, ends, text) == ("ERROR", "WARNING", f"{shop} answers again after 55s")


def test_a_circuit_that_another_relay_closed_has_ended_with_the_next_message_that_is_taken(log: Log) -> None:
    log(CircuitOpened(None, "refused", SOON))
    log.now += 3
    for _ in range(2):
        log(Relayed(Attempt(Message(routing_key="order.created", body=b""), 1, 7), Done()))
    assert [text for _, text in log.lines()][1:] == ["the destination answers again after 3s"]


def test_a_single_fault_is_a_line_each_time(log: Log) -> None:
    for _ in range(3):
        log(Troubled("on_error of billing", OSError("no mail server"), timedelta(0)))
    assert len(log.lines()) == 3


def test_observers_hear_every_error_and_the_first_success_after_it() -> None:
    heard: list[Event] = []
    outage = Outage("relay", DATABASE, heard.append)
    outage.over()
    for error in (AWAY, AWAY, REFUSED):
        outage.struck(error, SOON)
    outage.over()
    outage.over()
    assert [type(event) for event in heard] == [Troubled, Troubled, Troubled, Recovered]
    assert isinstance(heard[-1], Recovered) and (heard[-1].error, heard[-1].outage_of) == (REFUSED, DATABASE)
