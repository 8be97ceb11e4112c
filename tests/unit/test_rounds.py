"""Rounds: a relay works at once while there is work, then at a growing pace, through whatever goes wrong."""

import asyncio
import gc
from collections.abc import Callable
from datetime import timedelta

import pytest

from outbox.core.errors import TransportClosed
from outbox.core.events import Event, Recovered, Troubled
from outbox.core.loops import finish
from outbox.outbound import relay as relay_module
from outbox.outbound import relay as side_by_side
from outbox.outbound.relay import Relay, Sending, unless

LONG = 30.0  # seconds that no test sleeps


class Rounds:
    """Work that says how each of its rounds ends; the last one ends the relay. A full batch is five."""

    batch_size = 5
    asked = True

    def __init__(self, *rounds: int | Exception) -> None:
        self.left = list(rounds)
        self.stop = asyncio.Event()
        self.pauses: list[float] = []
        self.events: list[Event] = []

    async def round(self) -> int:
        outcome = self.left.pop(0)
        if not self.left:
            self.stop.set()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def wait(self, longest: float) -> None:
        self.pauses.append(longest)

    async def relay(self) -> None:
        relay = Relay(self, wait=self.wait, poll_interval=0.4, observe=self.events.append, name="relay")
        await asyncio.wait_for(relay.run(self.stop), LONG)


async def test_while_batches_are_full_nobody_waits() -> None:
    rounds = Rounds(5, 5, 5)
    await rounds.relay()
    assert rounds.pauses == []


async def test_the_pauses_grow_while_nothing_comes_and_are_short_again_after_work() -> None:
    rounds = Rounds(0, 0, 0, 0, 0, 1, 0, 5)
    await rounds.relay()
    assert rounds.pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.4, 0.05, 0.1])


async def test_an_error_is_told_and_outlived() -> None:
    rounds = Rounds(OSError("away"), 1, 1)
    await rounds.relay()
    event, end = rounds.events
    assert isinstance(event, Troubled) and isinstance(end, Recovered)
    assert (event.where, str(event.error), event.pause) == ("relay", "away", timedelta(seconds=0.2))


async def test_a_relay_that_is_stopped_starts_nothing() -> None:
    rounds = Rounds(1)
    rounds.stop.set()
    await rounds.relay()
    assert rounds.left == [1]


async def test_a_stop_ends_the_pause_after_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHORTEST_TROUBLE", "LONGEST_TROUBLE"):
        monkeypatch.setattr(relay_module, name, 4 * LONG)
    stop = asyncio.Event()

    class Failing:
        batch_size = 1
        asked = True

        async def round(self) -> int:
            asyncio.get_running_loop().call_soon(stop.set)
            raise OSError("away")

    relay = Relay(Failing(), wait=asyncio.sleep, poll_interval=4 * LONG, observe=lambda event: None, name="relay")
    await asyncio.wait_for(relay.run(stop), LONG)


async def test_a_sleep_ends_with_the_stop_and_takes_its_task_with_it() -> None:
    stop, cancelled = asyncio.Event(), asyncio.Event()

    async def sleeping() -> None:
        try:
            await asyncio.sleep(LONG)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    asyncio.get_running_loop().call_later(0.01, stop.set)
    await asyncio.wait_for(unless(stop, sleeping()), LONG / 2)
    assert cancelled.is_set()


async def test_an_error_of_the_sleep_is_raised() -> None:
    async def failing() -> None:
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        await unless(asyncio.Event(), failing())


# Work that must not be cut.


class Work:
    """Something that begins, and ends when it is told to go on."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun, self.go_on, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._error = error

    async def cancelled(self) -> asyncio.Task[None]:
        """What finishes it, cancelled while it is at work."""
        task = asyncio.create_task(finish(self._run(), LONG))
        await self.begun.wait()
        task.cancel()
        await asyncio.sleep(0)
        return task

    async def _run(self) -> None:
        self.begun.set()
        await self.go_on.wait()
        self.ended.set()
        if self._error is not None:
            raise self._error


async def test_a_cancellation_waits_until_the_work_is_over_and_is_then_raised() -> None:
    work = Work()
    task = await work.cancelled()
    assert not task.done()
    work.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.ended.is_set()


@pytest.mark.parametrize("make", [lambda: OSError("away"), lambda: KeyError("x")])
async def test_an_error_of_the_work_is_raised_as_it_is(make: Callable[[], Exception]) -> None:
    error = make()

    async def work() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await finish(work(), LONG)
    assert caught.value is error


async def test_the_value_of_the_work_comes_back() -> None:
    async def work() -> str:
        return "written"

    assert await finish(work(), LONG) == "written"


async def test_an_error_after_a_cancellation_gives_way_to_the_cancellation() -> None:
    work = Work(OSError("away"))
    task = await work.cancelled()
    work.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_second_cancellation_does_not_cut_the_work_either() -> None:
    work = Work()
    task = await work.cancelled()
    task.cancel()
    await asyncio.sleep(0)
    work.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(work.ended.wait(), LONG)


class Batches(Rounds):
    """Batches of which the test sees how many are under way; the last one of them ends the relay."""

    def __init__(self, *rounds: int | Exception) -> None:
        super().__init__(*rounds)
        self.under_way = self.most_under_way = 0

    async def round(self, sending: Sending = lambda count: None) -> int:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(0)
            count = await super().round()
            if count:
                sending(count)
                await self.answers(count)
            return count
        finally:
            self.under_way -= 1

    async def answers(self, count: int) -> None:
        await asyncio.sleep(0.01)

    async def relay(self) -> None:
        relay = Relay(
            self,
            wait=self.wait,
            poll_interval=0.4,
            observe=self.events.append,
            name="relay",
            rounds=side_by_side.Rounds(self, 2),
        )
        await asyncio.wait_for(relay.run(self.stop), LONG)

    @property
    def errors(self) -> list[str]:
        return [str(event.error) for event in self.events if isinstance(event, Troubled)]


async def test_while_batches_are_full_two_are_under_way() -> None:
    batches = Batches(*[5] * 10)
    batches.left += [0, 0]
    await batches.relay()
    assert batches.most_under_way == 2


async def test_a_batch_that_is_not_full_is_followed_by_none() -> None:
    batches = Batches(1, 1, 1)
    await batches.relay()
    assert batches.most_under_way == 1


async def test_a_publisher_that_took_anything_claims_again_before_it_sleeps() -> None:
    batches = Batches(1, 1, 0, 5)
    await batches.relay()
    assert batches.pauses == pytest.approx([0.05])


async def test_a_batch_that_fails_cuts_no_other() -> None:
    batches = Batches(5, OSError("away"), 5, 0, 0)
    await batches.relay()
    assert batches.errors == ["away"]
    assert (batches.under_way, batches.left) == (0, [])


async def test_after_an_error_a_whole_batch_ends_no_outage_before_anything_is_claimed() -> None:
    class Settled(Batches):
        """The database goes away while batches wait for answers, and is away for two rounds more."""

        async def answers(self, count: int) -> None:
            await super().answers(count)
            if self.left:
                raise OSError("away while settling")

    batches = Settled(5, 5, OSError("away"), OSError("still away"), 0)
    await batches.relay()
    assert batches.errors == ["away while settling", "away", "still away"]
    assert [type(event) for event in batches.events] == [Troubled, Troubled, Troubled, Recovered]


async def test_a_stop_begins_no_further_batch() -> None:
    batches = Batches(*[5] * 20)

    async def answers(count: int) -> None:
        if len(batches.left) == 16:
            batches.stop.set()
        await asyncio.sleep(0)

    batches.answers = answers  # type: ignore[method-assign]
    await batches.relay()
    assert len(batches.left) >= 15


class Stuck(Batches):
    """Batches without an answer until the test gives one, or an error."""

    def __init__(self, *rounds: int | Exception) -> None:
        super().__init__(*rounds)
        self.given: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def answers(self, count: int) -> None:
        await asyncio.shield(self.given)

    async def until(self, left: int) -> None:
        async with asyncio.timeout(LONG):
            while len(self.left) > left:
                await asyncio.sleep(0.01)


async def test_a_batch_without_an_answer_keeps_no_other_from_beginning_and_not_too_many_do() -> None:
    batches = Stuck(1, 1, 1, 0)
    relay = asyncio.create_task(batches.relay())
    await batches.until(left=2)
    await asyncio.sleep(3 * side_by_side.STUCK)
    assert (len(batches.left), batches.under_way) == (2, 2)
    batches.given.set_result(None)
    await relay
    assert (batches.under_way, batches.most_under_way) == (0, 2)


async def test_a_relay_sleeps_until_a_batch_in_the_background_has_ended_and_no_longer() -> None:
    batches = Stuck(1, 0, 0)
    woken = asyncio.Event()

    async def wait(longest: float) -> None:
        batches.pauses.append(longest)
        if len(batches.pauses) == 2:
            woken.set()
            await asyncio.sleep(4 * LONG)

    batches.wait = wait  # type: ignore[method-assign]
    relay = asyncio.create_task(batches.relay())
    await asyncio.wait_for(woken.wait(), LONG)
    batches.given.set_result(None)
    await relay
    assert batches.left == []


async def test_what_stuck_batches_end_with_is_told_once() -> None:
    batches = Stuck(1, 1, 1, 0)
    relay = asyncio.create_task(batches.relay())
    await batches.until(left=2)
    batches.given.set_exception(OSError("away"))
    await relay
    assert batches.errors == ["away"] * 2  # of the first two, and of the third, which began after that


async def test_a_stop_waits_for_batches_that_have_begun_and_tells_how_they_failed() -> None:
    batches = Stuck(1, 0, 0)
    relay = asyncio.create_task(batches.relay())
    await batches.until(left=1)
    batches.stop.set()
    await asyncio.sleep(0.05)
    assert not relay.done()
    batches.given.set_exception(OSError("away"))
    await relay
    assert batches.errors == ["away"]


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_relay_that_is_cancelled_takes_its_batches_with_it(stopped: bool) -> None:
    batches = Stuck(1, 0, 0, 0, 0, 0, 0, 0)
    relay = asyncio.create_task(batches.relay())
    await batches.until(left=6)
    if stopped:
        batches.stop.set()
        await asyncio.sleep(0.05)
    relay.cancel()
    with pytest.raises(asyncio.CancelledError):
        await relay
    assert batches.under_way == 0


async def test_a_transport_that_is_closed_ends_the_relay_whichever_batch_meets_it() -> None:
    batches = Stuck(1, *[0] * 1000)
    relay = asyncio.create_task(batches.relay())
    await batches.until(left=999)
    batches.given.set_exception(TransportClosed("for good"))
    with pytest.raises(TransportClosed):
        await relay


async def test_how_other_batches_failed_is_not_left_to_the_loop_when_the_transport_is_closed() -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    batches = Stuck(1, TransportClosed("for good"), 0)
    relay = asyncio.create_task(batches.relay())
    await batches.until(left=1)
    batches.given.set_exception(OSError("away"))
    with pytest.raises(TransportClosed):
        await relay
    del relay, batches
    gc.collect()
    await asyncio.sleep(0)
    assert told == []
