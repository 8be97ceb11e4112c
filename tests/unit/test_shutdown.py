"""Shutdown: SIGINT and SIGTERM as two events."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from outbox.shutdown import SIGNALS, Shutdown, on_signals

LONG = 30.0  # seconds after which a test is lost

BOTH = pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)


@pytest.fixture(autouse=True)
def handlers_as_they_were() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    left = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert left == before


async def test_the_first_signal_begins_the_shutdown_and_the_second_forces_it() -> None:
    shutdown = Shutdown()
    assert (shutdown.begun.is_set(), shutdown.forced.is_set()) == (False, False)
    shutdown.signal()
    assert (shutdown.begun.is_set(), shutdown.forced.is_set()) == (True, False)
    shutdown.signal()
    assert (shutdown.begun.is_set(), shutdown.forced.is_set()) == (True, True)
    shutdown.signal()
    assert shutdown.forced.is_set()


def test_the_signals_are_those_of_a_terminal_and_of_a_service_manager() -> None:
    assert set(SIGNALS) == {signal.SIGINT, signal.SIGTERM}


@BOTH
async def test_a_signal_of_the_process_sets_the_event(number: signal.Signals) -> None:
    with on_signals() as shutdown:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(shutdown.begun.wait(), LONG)
        assert not shutdown.forced.is_set()
        os.kill(os.getpid(), number)
        await asyncio.wait_for(shutdown.forced.wait(), LONG)


async def test_two_different_signals_count_as_two() -> None:
    with on_signals() as shutdown:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(shutdown.begun.wait(), LONG)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(shutdown.forced.wait(), LONG)


@BOTH
async def test_the_handlers_of_before_are_put_back(number: signal.Signals) -> None:
    heard: list[int] = []

    def earlier(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    original = signal.signal(number, earlier)
    try:
        with on_signals() as shutdown:
            os.kill(os.getpid(), number)
            await asyncio.wait_for(shutdown.begun.wait(), LONG)
            assert heard == []
        assert signal.getsignal(number) is earlier
        os.kill(os.getpid(), number)
        await asyncio.sleep(0)
        assert heard == [number]
    finally:
        signal.signal(number, original)


async def test_the_handlers_are_put_back_after_an_error() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(RuntimeError, match="broke"), on_signals():
        raise RuntimeError("broke")
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_outside_of_the_main_thread_signals_are_left_alone() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    seen: list[bool] = []

    async def work() -> None:
        with on_signals() as shutdown:
            seen.append([signal.getsignal(number) for number in SIGNALS] == before)
            shutdown.signal()
            await asyncio.wait_for(shutdown.begun.wait(), LONG)
            seen.append(shutdown.begun.is_set())

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    thread.join(LONG)
    assert seen == [True, True]
