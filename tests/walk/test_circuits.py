"""Destinations that do not answer: relays find out together, ask with one message at a time, and burn no attempt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import pytest

from outbox import Message, Outbox, TransportUnavailable
from outbox.core.events import CircuitClosed, CircuitOpened
from outbox.core.store import CircuitState
from outbox.core.transport import Published
from outbox.outbound import circuit
from outbox.outbound.circuit import LOOK_EVERY
from outbox.outbound.cleanup import Cleanup
from outbox.testing.clock import advance
from tests.support.databases import either_feed
from tests.support.observing import PATIENCE, Recorder, Statements, eventually
from tests.support.outboxes import MakeOutbox, emit
from tests.walk.destinations import Answer, Sink, broken, no, nothing, unavailable, yes
from tests.walk.rounds import BATCH, Process, state


async def untouched(outbox: Outbox) -> bool:
    """Whether no message has lost an attempt or is held by anybody."""
    return {(each.attempt_count, each.crash_count, each.leased_until) for each in await outbox.messages()} <= {
        (0, 0, None)
    }


@pytest.mark.parametrize("answer", [nothing, unavailable])
async def test_after_a_round_without_any_answer_nobody_asks(outbox: Outbox, answer: Answer) -> None:
    relay = Process(outbox, Sink(answer))
    await emit(outbox, *range(20))
    assert [await relay.round() for _ in range(3)] == [0, 0, 0]
    assert relay.sink.sizes == [BATCH]
    assert relay.pauses == [1.0]
    assert 0 < relay.breaker.held() <= LOOK_EVERY
    [found] = (await outbox.backlog()).circuits
    assert (found.state, found.failures) == (CircuitState.OPEN, 1)
    assert found.error in ("connection refused", "sink confirmed nothing of 8 messages")
    assert await untouched(outbox)


async def test_while_a_circuit_is_open_nothing_is_asked_that_could_show_a_database_to_be_back(outbox: Outbox) -> None:
    relay = Process(outbox, Sink(nothing))
    await emit(outbox, *range(20))
    await relay.round()
    assert relay.publisher.asked
    await relay.round()
    assert not relay.publisher.asked
    await relay.pass_time(100)
    await relay.round()
    assert relay.publisher.asked


async def test_each_probe_is_one_message_and_another_one_and_pauses_double(outbox: Outbox) -> None:
    relay = Process(outbox, Sink(nothing))
    await emit(outbox, *range(20))
    for _ in range(9):
        assert await relay.round() == 0
        await relay.pass_time(100)
    assert relay.sink.sizes == [BATCH] + [1] * 8
    assert len({call[0].id for call in relay.sink.calls[1:]}) == 8
    assert relay.pauses == [1, 2, 4] + [7.5] * 6
    assert await untouched(outbox)


async def test_pauses_are_those_that_restart_delay_says(outbox: Outbox) -> None:
    def said(count: int, error: BaseException) -> float | None:
        assert isinstance(error, TransportUnavailable)
        return 5.0 * count if count < 3 else None

    relay = Process(outbox, Sink(unavailable), said)
    await emit(outbox, *range(20))
    for _ in range(4):
        await relay.round()
        await relay.pass_time(100)
    assert relay.pauses == [5, 10, 4, 7.5]


async def test_a_probes_message_stays_away_for_the_pause_and_no_other_does(outbox: Outbox) -> None:
    relay = Process(outbox, Sink(nothing))
    await emit(outbox, *range(3))
    await relay.round()
    await relay.pass_time(2)
    await relay.round()
    due = [claimable.due for claimable in await outbox.store.inspection.claimable()]
    assert due == [2]


async def test_a_message_that_is_due_a_moment_after_its_probe_is_not_left_until_the_next_poll(outbox: Outbox) -> None:
    relay = Process(outbox, Sink(nothing))
    await emit(outbox, *range(1))
    for _ in range(2):
        await relay.round()
        await relay.pass_time(10)
    async with asyncio.timeout(PATIENCE):
        await relay.publisher.wait(3600)  # it was not due when a claim looked, and is now: nothing rings any more
    relay.sink.answer = yes
    assert await relay.round() == 1


async def test_an_answer_closes_it_and_traffic_grows_back(outbox: Outbox) -> None:
    relay = Process(outbox, Sink(nothing))
    await emit(outbox, *range(40))
    await relay.round()
    await relay.pass_time(2)
    relay.sink.answer = yes
    assert [await relay.round() for _ in range(6)] == [1, 2, 4, 8, 8, 8]
    assert relay.sink.sizes == [8, 1, 2, 4, 8, 8, 8]
    assert await state(outbox) is CircuitState.CLOSED
    assert len(relay.recorder.of(CircuitClosed)) == 1


async def test_a_refusal_is_an_answer(outbox: Outbox) -> None:
    relay = Process(outbox, Sink(nothing))
    await emit(outbox, *range(1))
    await relay.round()
    await relay.pass_time(2)
    relay.sink.answer = no
    assert await relay.round() == 1
    assert await state(outbox) is CircuitState.CLOSED
    [stored] = await outbox.messages()
    assert stored.attempt_count == 1


async def test_another_relay_sees_it_before_its_next_batch_goes_out(make_outbox: MakeOutbox) -> None:
    first, second = Process(make_outbox(), Sink(yes)), Process(make_outbox(), Sink(yes))
    await emit(first.outbox, *range(1))
    assert await second.round() == 1
    await emit(first.outbox, *range(20))
    first.sink.answer = nothing
    await first.round()
    second.now += LOOK_EVERY
    assert await second.round() == 0
    assert second.sink.sizes == [1]
    assert await untouched(first.outbox)


async def test_of_many_relays_one_probes(make_outbox: MakeOutbox) -> None:
    relays = [Process(make_outbox(), Sink(nothing)) for _ in range(5)]
    await emit(relays[0].outbox, *range(20))
    await relays[0].round()
    for relay in relays[1:]:
        await relay.round()
    await advance(relays[0].outbox, 2)
    for relay in relays:
        relay.now += 2
    await asyncio.gather(*(relay.round() for relay in relays))
    assert sorted(size for relay in relays for size in relay.sink.sizes[0 if relay is not relays[0] else 1 :]) == [1]
    assert await untouched(relays[0].outbox)


def asked(statements: Sequence[str]) -> int:
    return sum("_circuits." in statement for statement in statements)


async def test_while_it_is_closed_a_round_takes_no_statement_more(outbox: Outbox) -> None:
    relay = Process(outbox, Sink(yes))
    await emit(outbox, *range(10 * BATCH))
    with Statements() as first:
        await relay.round()
    assert asked(first) == 1  # it may have been open before
    with Statements() as statements:
        assert [await relay.round() for _ in range(9)] == [BATCH] * 9
    assert asked(statements) == 0


async def test_a_busy_relay_asks_once_a_second_whatever_the_number_of_rounds(outbox: Outbox) -> None:
    relay = Process(outbox, Sink(yes))
    await emit(outbox, *range(20 * BATCH))
    with Statements() as statements:
        for _ in range(20):
            assert await relay.round() == BATCH
            relay.now += LOOK_EVERY / 4
    assert asked(statements) == 5


async def test_a_relay_with_nothing_to_send_never_asks_how_its_destination_is(outbox: Outbox) -> None:
    relay = Process(outbox, Sink(yes))
    await outbox.create_tables()
    with Statements() as statements:
        for _ in range(5):
            relay.now += 10
            assert await relay.round() == 0
        assert asked(statements) == 0
        await emit(outbox, *range(1))
        assert await relay.round() == 1
        assert asked(statements) == 1


async def test_a_probe_that_is_cut_off_leaves_the_next_one_to_others_at_once(make_outbox: MakeOutbox) -> None:
    async def hang(messages: Sequence[Message]) -> Published:
        await asyncio.sleep(3600)
        raise AssertionError

    relay, other = Process(make_outbox(), Sink(nothing)), Process(make_outbox(), Sink(yes))
    await emit(relay.outbox, *range(2))
    await relay.round()
    await relay.pass_time(2)
    relay.sink.answer = hang
    probing = asyncio.create_task(relay.round())
    await eventually(lambda: len(relay.sink.calls) == 2)
    assert await state(relay.outbox) is CircuitState.PROBING
    probing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await probing
    assert await state(relay.outbox) is CircuitState.OPEN
    await other.round()  # sees that it is open
    assert await other.round() == 1
    assert await state(relay.outbox) is CircuitState.CLOSED


async def test_a_client_that_breaks_in_a_probe_leaves_the_next_one_to_others(outbox: Outbox) -> None:
    relay = Process(outbox, Sink(nothing))
    await emit(outbox, *range(2))
    await relay.round()
    await relay.pass_time(2)
    relay.sink.answer = broken
    with pytest.raises(RuntimeError):
        await relay.round()
    assert await state(outbox) is CircuitState.OPEN
    assert await untouched(outbox)


async def test_silence_does_not_open_it_while_others_get_answers(outbox: Outbox) -> None:
    released = asyncio.Event()

    async def silent(messages: Sequence[Message]) -> Published:
        await released.wait()
        return Published()

    relay = Process(outbox, Sink(silent))
    await emit(outbox, *range(2 * BATCH))
    late = asyncio.create_task(relay.round())
    await eventually(lambda: len(relay.sink.calls) == 1)
    relay.sink.answer = yes
    relay.now += 1
    assert await relay.round() == BATCH
    released.set()
    assert await late == 0
    assert await outbox.store.circuits.all() == []
    assert await untouched(outbox)


async def test_a_round_that_asked_nothing_does_not_open_it(outbox: Outbox) -> None:
    relay = Process(outbox, Sink(lambda messages: Published(asked=False)))
    await emit(outbox, *range(20))
    assert await relay.round() == 0
    assert await state(outbox) is None
    assert await untouched(outbox)
    relay.sink.answer = yes
    assert await relay.round() == BATCH


async def test_a_probe_that_asked_nothing_leaves_the_next_one_to_others(outbox: Outbox) -> None:
    relay = Process(outbox, Sink(nothing))
    await emit(outbox, *range(20))
    await relay.round()
    await relay.pass_time(2)
    relay.sink.answer = lambda messages: Published(asked=False)
    assert await relay.round() == 0
    assert relay.sink.sizes == [BATCH, 1]
    assert await state(outbox) is CircuitState.OPEN


async def test_a_late_answer_to_an_earlier_round_closes_it(outbox: Outbox) -> None:
    released = asyncio.Event()

    async def slow(messages: Sequence[Message]) -> Published:
        await released.wait()
        return yes(messages)

    relay = Process(outbox, Sink(slow))
    await emit(outbox, *range(2 * BATCH))
    late = asyncio.create_task(relay.round())
    await eventually(lambda: len(relay.sink.calls) == 1)
    relay.sink.answer = nothing
    await relay.round()
    assert await state(outbox) is CircuitState.OPEN
    released.set()
    assert await late == BATCH
    assert await state(outbox) is CircuitState.CLOSED


async def test_what_expires_while_its_destination_is_away_is_dead(outbox: Outbox) -> None:
    relay = Process(outbox, Sink(nothing))
    await emit(outbox, *range(3), expiration=10)
    await relay.round()
    cleanup = Cleanup(outbox.store, clean_up_after="NEVER", inbox_retention="NEVER", observe=relay.recorder)
    assert await cleanup.round() == 0
    await advance(outbox, 11)
    assert await cleanup.round() == 3
    assert dict((await outbox.backlog()).dead_by_reason) == {"expired": 3}


async def test_one_silent_message_alone_lets_others_pass_at_once_and_a_second_one_nobody(
    make_outbox: MakeOutbox,
) -> None:
    first, second = Process(make_outbox(), Sink(nothing)), Process(make_outbox(), Sink(nothing))
    await emit(first.outbox, *range(1))
    for relay in (first, second, first):  # whoever tries it, and again
        await relay.round()
        await relay.round()
        await advance(first.outbox, 10)
    assert first.sink.sizes + second.sink.sizes == [1, 1, 1]
    await first.round()
    await emit(first.outbox, *range(2))
    second.now += LOOK_EVERY
    assert [await second.round() for _ in range(3)] == [0, 0, 0]
    assert len(second.sink.calls) == 2, "the one that it had tried, and one of the others"
    second.now += LOOK_EVERY
    assert await second.round() == 0
    assert len(second.sink.calls) == 2
    assert await untouched(first.outbox)


async def test_while_one_message_alone_is_silent_another_one_closes_it_at_once(make_outbox: MakeOutbox) -> None:
    first, second = Process(make_outbox(), Sink(nothing)), Process(make_outbox(), Sink(yes))
    await emit(first.outbox, *range(1))
    await first.round()
    await emit(first.outbox, *range(1))
    second.now += LOOK_EVERY
    assert [await second.round(), await second.round()] == [0, 1]
    assert await state(first.outbox) is CircuitState.CLOSED


async def test_beside_a_probe_without_an_answer_one_other_message_is_asked_about_and_no_third(
    make_outbox: MakeOutbox,
) -> None:
    released = asyncio.Event()

    async def hang(messages: Sequence[Message]) -> Published:
        await released.wait()
        return Published()

    relays = [Process(make_outbox(), Sink(nothing)) for _ in range(4)]
    outbox = relays[0].outbox
    await emit(outbox, *range(20))
    for relay in relays:
        await relay.round()
    for relay in relays:
        relay.sink.answer = hang
    probing = []
    for relay in relays:
        await advance(outbox, 2)
        for each in relays:
            each.now += 2
        probing.append(asyncio.create_task(relay.round()))
        await asyncio.wait(probing[-1:], timeout=0.3)
    assert [len(relay.sink.calls) for relay in relays] == [2, 1, 0, 0]
    released.set()
    assert await asyncio.gather(*probing) == [0] * 4
    assert await untouched(outbox)


@either_feed
async def test_relays_live_through_an_outage_and_lose_nothing(
    make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(circuit, "SHORTEST", 0.05)
    monkeypatch.setattr(circuit, "LONGEST", 0.2)
    sink, recorder = Sink(nothing), Recorder()
    options = {"transport": sink, "relay_retry_delays": (), "batch_size": BATCH, "observers": [recorder]}
    first, second = make_outbox(**options), make_outbox(**options)
    async with first.running(relay=True), second.running(relay=True):
        await emit(first, *range(100))
        await recorder.wait_for(CircuitOpened, 6)
        assert 1 in sink.sizes
        before = len(sink.calls)
        sink.answer = yes
        async with asyncio.timeout(PATIENCE):
            while (await first.backlog()).waiting:
                await asyncio.sleep(0.02)
    sent = [message.id for call in sink.calls[before:] for message in call]
    assert len(set(sent)) == 100
    assert (await first.backlog()).dead == 0
    assert await state(first) is CircuitState.CLOSED


@either_feed
async def test_one_message_that_silences_its_destination_does_not_stop_the_others(
    make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone at the head it would be every probe; so each probe's message steps back."""
    monkeypatch.setattr(circuit, "SHORTEST", 0.05)
    sent: set[bytes] = set()

    def unless_poisoned(messages: Sequence[Message]) -> Published:
        if any(message.body == b"0" for message in messages):
            return Published()
        sent.update(message.body for message in messages)
        return yes(messages)

    outbox = make_outbox(transport=Sink(unless_poisoned), batch_size=BATCH)
    async with outbox.running(relay=True):
        await emit(outbox, *range(20))
        await eventually(lambda: len(sent) == 19)
    assert [stored.message.body for stored in await outbox.messages()] == [b"0"]
    assert await untouched(outbox)
