"""TransportSettlingCases: what each outcome means."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from outbox.core.attempt import Done, Released, RetryIn
from outbox.core.transport import Transport
from outbox.testing.transport.cases import TransportCases, consuming, listener, message, quiet, skip_where, take


class TransportSettlingCases(TransportCases):
    """What each outcome means."""

    async def test_done_means_it_does_not_come_back(self, transport: Transport) -> None:
        await transport.declare([listener()])
        await transport.publish([message()])
        async with consuming(transport) as deliveries:
            [delivery] = await take(deliveries)
            assert await delivery.settle(Done()) is True
            assert await quiet(deliveries)

    async def test_a_retry_comes_back_after_its_delay(self, transport: Transport) -> None:
        skip_where(transport, "delays", False, "a retry comes back at once")
        await transport.declare([listener()])
        await transport.publish([message()])
        loop = asyncio.get_running_loop()
        async with consuming(transport) as deliveries:
            [delivery] = await take(deliveries)
            began = loop.time()
            assert await delivery.settle(RetryIn(timedelta(milliseconds=400), "boom")) is True
            [again] = await take(deliveries)
            assert loop.time() - began >= 0.399
            await again.settle(Done())

    async def test_a_retry_comes_back_unchanged_with_the_next_attempt_count(self, transport: Transport) -> None:
        await transport.declare([listener()])
        sent = message("order.created", headers={"a": "b"})
        await transport.publish([sent])
        async with consuming(transport) as deliveries:
            [delivery] = await take(deliveries)
            assert await delivery.settle(RetryIn(timedelta(milliseconds=20), "boom")) is True
            [again] = await take(deliveries)
            assert again.attempt.message == sent
            assert again.attempt.attempt_count == 2
            await again.settle(Done())

    async def test_a_retry_without_delay_comes_back_at_once(self, transport: Transport) -> None:
        await transport.declare([listener()])
        await transport.publish([message()])
        async with consuming(transport) as deliveries:
            for expected in (1, 2, 3):
                [delivery] = await take(deliveries)
                assert delivery.attempt.attempt_count == expected
                await delivery.settle(RetryIn(timedelta(0), "boom") if expected < 3 else Done())

    async def test_a_retry_comes_back_only_to_the_queue_that_failed(self, transport: Transport) -> None:
        await transport.declare([listener("a"), listener("b")])
        await transport.publish([message()])
        async with consuming(transport, "a") as failing, consuming(transport, "b") as fine:
            [failed], [done] = await take(failing), await take(fine)
            await done.settle(Done())
            await failed.settle(RetryIn(timedelta(milliseconds=50), "boom"))
            [again] = await take(failing)
            assert again.attempt.attempt_count == 2
            await again.settle(Done())
            assert await quiet(fine)

    async def test_released_comes_back_at_once_and_burns_no_attempt(self, transport: Transport) -> None:
        await transport.declare([listener()])
        await transport.publish([message()])
        async with consuming(transport) as deliveries:
            for _ in range(3):
                [delivery] = await take(deliveries)
                assert (delivery.attempt.attempt_count, delivery.attempt.crash_count) == (1, 0)
                await delivery.settle(Released())
            [delivery] = await take(deliveries)
            await delivery.settle(Done())

    async def test_settling_twice_counts_once(self, transport: Transport) -> None:
        await transport.declare([listener()])
        await transport.publish([message()])
        async with consuming(transport) as deliveries:
            [delivery] = await take(deliveries)
            first = delivery.settle(Done())
            second = delivery.settle(RetryIn(timedelta(0), "no"))
            assert await first is True
            assert second.cancelled()
            assert await quiet(deliveries)
