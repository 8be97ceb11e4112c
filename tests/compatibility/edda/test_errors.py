""" "Retry Logic and Error Handling".

The rulings: `invalid` is dead with the reason refused, `failed` dead with the reason exhausted. `max_retries=3`, which
are three sends, is `relay_retry_delays` with two delays. Of the 4xx, 408, 425 and 429 are tried again. Whoever gives no
answer at all burns no attempt, unless others got one meanwhile. Delays grow by default.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from socket import AF_INET, EAI_NONAME, gaierror
from typing import Any

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from outbox import Outbox, Reason
from outbox.core.attempt import RetryIn
from outbox.core.events import CircuitClosed, CircuitOpened, Relayed
from outbox.transports.http import HttpTransport
from tests.compatibility.edda.orders import is_settled, send, states, walk
from tests.support.databases import on_every_store
from tests.support.http_sink import (
    Behaviour,
    HttpSink,
    by_type,
    close,
    drip,
    drip_body,
    endless,
    garbage,
    hang,
    redirect,
    reset,
    status,
    wrong_length,
)
from tests.support.observing import Recorder, eventually
from tests.support.outboxes import MakeOutbox

LATER = 3600  # seconds: not while this test runs


async def settled(outbox: Outbox, sink: HttpSink, answers: dict[str, Behaviour]) -> dict[str, str]:
    """The states that events end in which are answered so, by their type."""
    sink.behave(by_type(answers))
    async with outbox.running(relay=True):
        sent = [await send(outbox, routing_key) for routing_key in answers]
        await eventually(lambda: is_settled(outbox))
    return dict(zip(answers, await states(outbox, *sent), strict=True))


# 4xx: invalid


@on_every_store
async def test_a_4xx_is_a_permanent_failure_and_the_error_says_which(
    make_http_outbox: MakeOutbox, sink: HttpSink
) -> None:
    service = make_http_outbox()
    codes = (400, 401, 403, 404, 405, 409, 410, 413, 422, 451)
    answers = {f"answered.{code}": status(code, body=b"because of %d" % code) for code in codes}
    assert await settled(service, sink, answers) == dict.fromkeys(answers, "refused")
    assert len(sink.requests) == len(codes)  # each was sent once
    for letter in await service.dead_letters.list(reason=Reason.REFUSED):
        code = letter.message.routing_key.removeprefix("answered.")
        assert letter.attempt_count == 1
        assert f"it answered {code}" in letter.error
        assert f"because of {code}" in letter.error


@on_every_store
async def test_a_4xx_that_says_that_the_time_is_wrong_is_tried_again(
    make_http_outbox: MakeOutbox, sink: HttpSink
) -> None:
    service = make_http_outbox(relay_retry_delays=(LATER,))
    sink.behave(by_type({f"answered.{code}": status(code) for code in (408, 425, 429)}))
    async with service.running(relay=True):
        sent = [await send(service, f"answered.{code}") for code in (408, 425, 429)]
        await eventually(lambda: _have_failed(service, 3))
    assert await states(service, *sent) == ["waiting"] * 3


async def _have_failed(outbox: Outbox, count: int) -> bool:
    return [stored.attempt_count for stored in await outbox.messages()] == [1] * count


@on_every_store
async def test_a_broker_that_says_how_long_it_wants_to_be_left_alone_is(
    make_http_outbox: MakeOutbox, sink: HttpSink, recorder: Recorder
) -> None:
    service = make_http_outbox()
    sink.behave(status(503, {"retry-after": "1800"}))
    async with service.running(relay=True):
        await send(service)
        [relayed] = await recorder.wait_for(Relayed)
    assert isinstance(relayed.outcome, RetryIn)
    assert relayed.outcome.delay == timedelta(minutes=30)


@on_every_store
async def test_an_event_that_is_refused_keeps_no_other_from_being_sent(
    make_http_outbox: MakeOutbox, sink: HttpSink
) -> None:
    service = make_http_outbox(batch_size=1)
    answers = {"order.malformed": status(400), "order.created": status(200), "order.shipped": status(200)}
    assert await settled(service, sink, answers) == {
        "order.malformed": "refused",
        "order.created": "sent",
        "order.shipped": "sent",
    }


# 5xx: pending


@on_every_store
async def test_a_5xx_leaves_the_event_pending_with_one_attempt_more_and_the_error(
    make_http_outbox: MakeOutbox, sink: HttpSink
) -> None:
    service = make_http_outbox(relay_retry_delays=(LATER,))
    codes = (500, 501, 502, 503, 504, 507, 599)
    sink.behave(by_type({f"answered.{code}": status(code) for code in codes}))
    async with service.running(relay=True):
        sent = [await send(service, f"answered.{code}") for code in codes]
        await eventually(lambda: _have_failed(service, len(codes)))
    for message, code in zip(sent, codes, strict=True):
        found = await walk(service, message)
        assert (found.state, found.attempt_count, found.done_at) == ("waiting", 1, None)
        assert f"it answered {code}" in found.history
    assert len(sink.requests) == len(codes)


@on_every_store
async def test_an_event_is_published_once_the_broker_has_recovered(
    make_http_outbox: MakeOutbox, sink: HttpSink
) -> None:
    service = make_http_outbox(relay_retry_delays=(0.01, 0.01, 0.01))
    sink.behave(status(503), times=1)
    sink.behave(status(500), times=1)
    async with service.running(relay=True):
        sent = await send(service)
        await eventually(lambda: is_settled(service))
    found = await walk(service, sent)
    assert (found.state, found.attempt_count) == ("sent", 3)
    assert [line.rpartition("answered ")[2] for line in found.history.splitlines()] == [
        "503 Service Unavailable",
        "500 Internal Server Error",
    ]
    assert sink.ids == [sent.id] * 3


# Network errors: pending


class Names(AbstractResolver):
    """Knows the broker's host only after it failed in some ways."""

    def __init__(self, *failures: Exception) -> None:
        self._failures = list(failures)

    async def resolve(self, host: str, port: int = 0, family: Any = 0) -> list[ResolveResult]:
        if self._failures:
            raise self._failures.pop(0)
        return [ResolveResult(hostname=host, host="127.0.0.1", port=port, family=AF_INET, proto=0, flags=0)]

    async def close(self) -> None: ...


def named(sink: HttpSink, names: Names) -> HttpTransport:
    """The broker by a name that has to be looked up."""
    return HttpTransport(f"http://broker.test:{sink.port}/events", plain_http=True, resolver=names)


@on_every_store
async def test_whoever_gets_no_answer_tries_again_and_burns_no_attempt(
    make_http_outbox: MakeOutbox, sink: HttpSink, recorder: Recorder
) -> None:
    """With a single attempt: one that was burnt would make a dead letter."""
    service = make_http_outbox(transport=HttpTransport(sink.url, timeout=0.3), relay_retry_delays=())
    half_an_answer = garbage(b"HTTP/1.1 200 OK\r\ncontent-len")
    for silence in (reset(), close(), hang(), drip(0.2), garbage(), half_an_answer):
        sink.behave(silence, times=1)
    sink.behave(hang())
    async with service.running(relay=True):
        sent = await send(service)
        await sink.until(7)
        found = await walk(service, sent)
        assert (found.state, found.attempt_count) == ("waiting", 0)
        sink.behave(status(200))
        await eventually(lambda: is_settled(service))
    found = await walk(service, sent)
    assert (found.state, found.attempt_count) == ("sent", 1)
    assert len(recorder.of(CircuitOpened)) >= 6
    assert recorder.of(CircuitClosed)


@on_every_store
async def test_nobody_there_burns_no_attempt(make_http_outbox: MakeOutbox, sink: HttpSink, recorder: Recorder) -> None:
    service = make_http_outbox(relay_retry_delays=())
    await sink.stop()
    async with service.running(relay=True):
        sent = [await send(service) for _ in range(3)]
        await recorder.wait_for(CircuitOpened, 3)
        assert [(await walk(service, each)).attempt_count for each in sent] == [0, 0, 0]
        [circuit] = (await service.backlog()).circuits
        assert "Cannot connect" in circuit.error
        await sink.start()
        await eventually(lambda: is_settled(service))
    assert await states(service, *sent) == ["sent"] * 3


@on_every_store
async def test_a_host_that_cannot_be_found_is_looked_for_again(
    make_http_outbox: MakeOutbox, sink: HttpSink, recorder: Recorder
) -> None:
    unknown = gaierror(EAI_NONAME, "Name or service not known")
    names = Names(unknown, unknown)
    service = make_http_outbox(transport=named(sink, names), relay_retry_delays=())
    async with service.running(relay=True):
        sent = await send(service)
        await eventually(lambda: is_settled(service))
    assert await states(service, sent) == ["sent"]
    assert "Name or service not known" in recorder.of(CircuitOpened)[0].error


@on_every_store
async def test_no_answer_for_one_event_while_others_are_answered_counts_against_it(
    make_http_outbox: MakeOutbox, sink: HttpSink
) -> None:
    """It is this event that the broker cannot bear, and some day it has been tried often enough."""
    service = make_http_outbox(relay_retry_delays=())
    sink.behave(by_type({"order.poison": close()}))
    async with service.transaction() as session:
        poison = await service.emit(session, "order.poison", {})
        others = await service.emit_many(session, "order.created", range(20))
    assert poison is not None
    async with service.running(relay=True):
        await eventually(lambda: is_settled(service))
    assert await states(service, poison, *others) == ["exhausted", *["sent"] * 20]


# Unknown errors: pending


@on_every_store
async def test_an_error_that_nobody_expected_is_tried_again_and_counted(
    make_http_outbox: MakeOutbox, sink: HttpSink
) -> None:
    names = Names(RuntimeError("nobody expected this"))
    service = make_http_outbox(transport=named(sink, names))
    async with service.running(relay=True):
        sent = await send(service)
        await eventually(lambda: is_settled(service))
    found = await walk(service, sent)
    assert (found.state, found.attempt_count) == ("sent", 2)
    assert "RuntimeError: nobody expected this" in found.history


# Max retries exceeded: failed


@on_every_store
@pytest.mark.parametrize("max_retries", [1, 3, 5])
async def test_an_event_is_sent_so_often_in_total_and_then_has_failed(
    make_http_outbox: MakeOutbox, sink: HttpSink, max_retries: int
) -> None:
    service = make_http_outbox(relay_retry_delays=(0.01,) * (max_retries - 1))
    sink.behave(status(500, body=b"out of order"))
    async with service.running(relay=True):
        sent = await send(service)
        await eventually(lambda: is_settled(service))
    assert sink.ids == [sent.id] * max_retries
    [letter] = await service.dead_letters.list()
    assert (letter.reason, letter.attempt_count) == (Reason.EXHAUSTED, max_retries)
    assert letter.error.endswith("it answered 500 Internal Server Error: out of order")
    assert len(letter.history.splitlines()) == max_retries


@on_every_store
async def test_the_projects_timetable_with_its_three_attempts(make_http_outbox: MakeOutbox, sink: HttpSink) -> None:
    """503, no answer, 500. Edda would stop here; no answer burns no attempt, so there is one more, which fails."""
    service = make_http_outbox()
    sink.behave(status(503), times=1)
    sink.behave(close(), times=2)  # a connection that was kept is tried anew at once, which tells nothing yet
    sink.behave(status(500))
    async with service.running(relay=True):
        sent = await send(service)
        await eventually(lambda: is_settled(service))
    found = await walk(service, sent)
    assert (found.state, found.reason, found.attempt_count) == ("dead", "exhausted", 3)
    answers = [line for line in found.history.splitlines() if "answered" in line]
    assert [line.rpartition("answered ")[2][:3] for line in answers] == ["503", "500", "500"]


@on_every_store
async def test_a_400_stops_the_timetable_whatever_came_before(make_http_outbox: MakeOutbox, sink: HttpSink) -> None:
    service = make_http_outbox()
    sink.behave(status(503), times=1)
    sink.behave(status(400))
    async with service.running(relay=True):
        sent = await send(service)
        await eventually(lambda: is_settled(service))
    found = await walk(service, sent)
    assert (found.reason, found.attempt_count, len(sink.requests)) == ("refused", 2, 2)


# Intervals


def test_by_default_intervals_grow_and_there_is_no_last_attempt() -> None:
    """The project retries at every poll, three times."""
    policy = Outbox(db_engine_url="sqlite+aiosqlite://").settings.policy("relay_retry_delays")
    for attempt, seconds in ((1, 1), (2, 2), (5, 16), (20, 300), (1000, 300)):
        delay = policy.delay(attempt, ConnectionError())
        assert delay is not None
        assert 0.8 * seconds <= delay.total_seconds() <= 1.2 * seconds


@on_every_store
async def test_a_fixed_interval_is_a_list_of_equal_delays(
    make_http_outbox: MakeOutbox, sink: HttpSink, recorder: Recorder
) -> None:
    service = make_http_outbox(relay_retry_delays=(0.02, 0.02))
    sink.behave(status(500))
    async with service.running(relay=True):
        await send(service)
        *retries, _ = await recorder.wait_for(Relayed, 3)
    delays = [event.outcome.delay for event in retries if isinstance(event.outcome, RetryIn)]
    assert delays == [timedelta(milliseconds=20)] * 2


# Answers that are not as they should be


@on_every_store
async def test_the_status_counts_however_the_rest_of_the_answer_ends(
    make_http_outbox: MakeOutbox, sink: HttpSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.transports.http.client.BODY_WITHIN", 0.3)
    service = make_http_outbox(relay_retry_delays=())
    endings: dict[str, Callable[[int], Behaviour]] = {
        "short": lambda code: wrong_length(1000, code=code),
        "slow": lambda code: drip_body(0.1, code=code),
        "endless": lambda code: endless(code),
    }
    ends = {200: "sent", 400: "refused", 500: "exhausted"}
    answers = {f"{how}.{code}": ending(code) for how, ending in endings.items() for code in ends}
    assert await settled(service, sink, answers) == {f"{how}.{code}": ends[code] for how in endings for code in ends}
    assert len(sink.requests) == len(answers)


@on_every_store
async def test_an_answer_that_goes_on_after_its_end_is_an_answer(make_http_outbox: MakeOutbox, sink: HttpSink) -> None:
    service = make_http_outbox(relay_retry_delays=())
    sink.behave(wrong_length(2))
    async with service.running(relay=True):
        sent = await send(service)
        await eventually(lambda: is_settled(service))
    found = await walk(service, sent)
    assert (found.state, found.attempt_count) == ("sent", 1)
    assert sink.ids == [sent.id]


@on_every_store
async def test_a_redirect_to_this_machine_is_a_permanent_failure_and_not_followed(
    make_http_outbox: MakeOutbox, sink: HttpSink
) -> None:
    service = make_http_outbox()
    async with HttpSink() as inside:
        codes = (301, 302, 303, 307, 308)
        answers = {f"answered.{code}": redirect(f"{inside.url}/admin", code) for code in codes}
        assert await settled(service, sink, answers) == dict.fromkeys(answers, "refused")
        assert inside.connections == 0
    assert len(sink.requests) == len(codes)
    for letter in await service.dead_letters.list():
        assert "redirects are not followed" in letter.error
