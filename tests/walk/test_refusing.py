"""Destinations that refuse everything for a while, as after a bad deploy: few messages die, and all relays wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from outbox import Message, Outbox, Reason
from outbox.core.events import CircuitClosed, CircuitOpened, Relayed
from outbox.core.store import CircuitState
from outbox.core.transport import Published, Refusal
from outbox.outbound import circuit
from outbox.outbound.circuit import REFUSALS, REFUSED_FOR
from tests.support.http_sink import HttpSink, status
from tests.support.observing import Recorder, eventually
from tests.support.outboxes import MakeOutbox, emit
from tests.walk.destinations import Sink, no, nothing, yes
from tests.walk.rounds import BATCH, Process, state

NOT_FOUND = Refusal("it answered 404 Not Found", permanent=True, unspecific=True)


def not_found(messages: Sequence[Message]) -> Published:
    return Published(refused={message.id: NOT_FOUND for message in messages})


def invalid(messages: Sequence[Message]) -> Published:
    return Published(refused={message.id: replace(NOT_FOUND, unspecific=False) for message in messages})


async def dead(outbox: Outbox) -> int:
    return (await outbox.backlog()).dead or 0


async def refused(outbox: Outbox, count: int = 40) -> Process:
    """A relay whose destination refuses everything, after the rounds that it took to find out."""
    relay = Process(outbox, Sink(not_found))
    await emit(outbox, *range(count))
    await relay.round()
    await relay.round()
    return relay


async def test_after_ten_refusals_in_a_row_nothing_more_dies_and_no_relay_asks(outbox: Outbox) -> None:
    relay = await refused(outbox)
    assert [await relay.round() for _ in range(3)] == [0, 0, 0]
    assert relay.sink.sizes == [BATCH, BATCH]
    assert await dead(outbox) == REFUSALS
    [found] = (await outbox.backlog()).circuits
    assert (found.state, found.failures, found.refusing is not None) == (CircuitState.OPEN, 1, True)
    assert found.error == "it refuses everything: it answered 404 Not Found"
    assert relay.pauses == [1.0]
    assert {(each.attempt_count, each.crash_count, each.leased_until) for each in await outbox.messages()} == {
        (0, 0, None)
    }


async def test_each_probe_is_another_message_and_loses_no_attempt(outbox: Outbox) -> None:
    relay = await refused(outbox)
    for _ in range(5):
        await relay.pass_time(10)
        await relay.round()
    assert relay.sink.sizes == [BATCH, BATCH, 1, 1, 1, 1, 1]
    assert len({call[0].id for call in relay.sink.calls[2:]}) == 5
    assert relay.pauses == [1, 2, 4, 7.5, 7.5, 7.5]
    assert await dead(outbox) == REFUSALS
    assert {each.attempt_count for each in await outbox.messages()} == {0}


async def test_the_first_message_that_is_taken_ends_it(outbox: Outbox) -> None:
    relay = await refused(outbox)
    await relay.pass_time(2)
    relay.sink.answer = yes
    assert [await relay.round() for _ in range(4)] == [1, 2, 4, 8]
    assert await state(outbox) is CircuitState.CLOSED
    assert (await outbox.store.circuits.all())[0].refusing is None
    assert len(relay.recorder.of(CircuitClosed)) == 1
    relay.sink.answer = not_found
    before = await dead(outbox)
    await relay.round()
    assert await dead(outbox) - before == BATCH  # they are counted anew


async def test_after_a_quarter_of_an_hour_they_are_dead_as_ever(outbox: Outbox) -> None:
    relay = await refused(outbox)
    await relay.pass_time(REFUSED_FOR - 1)
    await relay.round()
    assert await dead(outbox) == REFUSALS
    await relay.pass_time(10)
    assert [await relay.round() for _ in range(6)] == [1, 2, 4, 8, 8, 7]
    assert await outbox.messages() == []
    assert dict((await outbox.backlog()).dead_by_reason) == {"refused": 40}
    assert await state(outbox) is CircuitState.CLOSED
    assert relay.recorder.of(CircuitClosed) == []


async def test_other_relays_know_for_how_long_it_was_so_and_that_it_is_over(make_outbox: MakeOutbox) -> None:
    first = await refused(make_outbox(), 60)
    other = Process(make_outbox(), Sink(not_found))
    await other.round()  # finds it open
    assert other.sink.calls == []
    await first.pass_time(REFUSED_FOR - 5)
    other.now += REFUSED_FOR - 5
    await other.round()
    assert (other.sink.sizes, await dead(first.outbox)) == ([1], REFUSALS)
    await first.pass_time(10)
    other.now += 10
    assert await other.round() == 1
    assert await dead(first.outbox) == REFUSALS + 1
    first.sink.answer = yes
    assert await first.round() == 1
    assert (await first.outbox.store.circuits.all())[0].refusing is None


async def test_a_message_that_is_refused_alone_is_dead_at_once(outbox: Outbox) -> None:
    relay = Process(outbox, Sink(not_found))
    await emit(outbox, *range(1))
    assert await relay.round() == 1
    assert await dead(outbox) == 1
    assert await outbox.store.circuits.all() == []


async def test_refusals_between_which_something_is_taken_open_nothing(outbox: Outbox) -> None:
    def mostly(messages: Sequence[Message]) -> Published:
        refused = {message.id: NOT_FOUND for message in messages[1:]}
        return Published(frozenset([messages[0].id]), refused)

    relay = Process(outbox, Sink(mostly))
    await emit(outbox, *range(40))
    assert [await relay.round() for _ in range(5)] == [BATCH] * 5
    assert await dead(outbox) == 35
    assert await outbox.store.circuits.all() == []


async def test_refusals_that_are_about_the_message_open_nothing(outbox: Outbox) -> None:
    relay = Process(outbox, Sink(invalid))
    await emit(outbox, *range(40))
    assert [await relay.round() for _ in range(5)] == [BATCH] * 5
    assert await dead(outbox) == 40


async def test_silence_and_other_refusals_do_not_begin_the_quarter_of_an_hour_anew(outbox: Outbox) -> None:
    relay = await refused(outbox)
    for answer in (nothing, no, not_found):
        await relay.pass_time(REFUSED_FOR / 3 + 10)
        relay.sink.answer = answer
        await relay.round()
    assert await dead(outbox) == REFUSALS + 2  # the second answer closed it, so two messages went out


@pytest.fixture
async def sink() -> AsyncIterator[HttpSink]:
    async with HttpSink() as sink:
        yield sink


@pytest.mark.parametrize("code", [401, 403, 404, 405])
async def test_a_bad_deploy_of_a_receiver_kills_few_messages(
    make_outbox: MakeOutbox, sink: HttpSink, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(circuit, "SHORTEST", 0.1)
    recorder = Recorder()
    outbox = make_outbox(transport=sink.url, observers=[recorder], batch_size=100)
    sink.behave(status(code))
    async with outbox.running(relay=True):
        await emit(outbox, *range(300))
        await recorder.wait_for(CircuitOpened, 3)
        sink.behave(status(200))
        await recorder.wait_for(Relayed, 300)
    letters = await outbox.dead_letters.list()
    assert {letter.reason for letter in letters} == {Reason.REFUSED}
    assert len(letters) == REFUSALS
    assert await eventually(lambda: _empty(outbox))


async def _empty(outbox: Outbox) -> bool:
    await asyncio.sleep(0.02)
    return not await outbox.messages()
