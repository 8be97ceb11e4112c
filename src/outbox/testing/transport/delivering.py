"""TransportDeliveringCases: how deliveries come, and what is given back."""

from __future__ import annotations

import asyncio

from outbox.core.attempt import Done
from outbox.core.transport import Transport
from outbox.testing.transport.cases import (
    QUIET,
    SOON,
    MakeTransport,
    TransportCases,
    consuming,
    emptied,
    listener,
    message,
    quiet,
    skip_where,
    take,
)


class TransportDeliveringCases(TransportCases):
    """How deliveries come, and what is given back."""

    async def test_messages_of_one_key_come_in_the_order_in_which_they_were_published(
        self, transport: Transport
    ) -> None:
        skip_where(transport, "keeps_order", False, "messages of one key may overtake each other")
        await transport.declare([listener()])
        for start in range(0, 30, 10):
            await transport.publish([message(body=str(start + n).encode(), key="k") for n in range(10)])
        assert [int(found.body) for found in await emptied(transport, count=30)] == list(range(30))

    async def test_no_more_than_prefetch_messages_are_out_at_once(self, transport: Transport) -> None:
        await transport.declare([listener()])
        await transport.publish([message() for _ in range(5)])
        async with consuming(transport, prefetch=2) as deliveries:
            first, second = await take(deliveries, 2)
            assert await quiet(deliveries)
            await first.settle(Done())
            [third] = await take(deliveries)
            for delivery in (second, third):
                await delivery.settle(Done())

    async def test_two_consumers_share_a_queue(self, make_transport: MakeTransport) -> None:
        transports = [make_transport(), make_transport()]
        for transport in transports:
            await transport.open()
        await transports[0].declare([listener()])
        await transports[0].publish([message(body=str(n).encode()) for n in range(40)])
        seen: list[bytes] = []
        everything = asyncio.Event()

        async def serve(transport: Transport) -> None:
            async with consuming(transport, prefetch=4) as deliveries:
                async for delivery in deliveries:
                    seen.append(delivery.attempt.message.body)
                    await delivery.settle(Done())
                    if len(seen) == 40:
                        everything.set()

        tasks = [asyncio.create_task(serve(transport)) for transport in transports]
        async with asyncio.timeout(SOON):
            await everything.wait()
        await asyncio.sleep(QUIET)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert sorted(seen) == sorted(str(n).encode() for n in range(40))
        for transport in transports:
            await transport.close()

    async def test_what_nobody_took_is_given_back_when_the_consumer_closes(self, transport: Transport) -> None:
        await transport.declare([listener()])
        await transport.publish([message() for _ in range(5)])
        async with consuming(transport) as deliveries:
            [delivery] = await take(deliveries)
            await delivery.settle(Done())
        async with consuming(transport) as deliveries:
            again = await take(deliveries, 4)
            assert [(d.attempt.attempt_count, d.attempt.crash_count) for d in again] == [(1, 0)] * 4
            for delivery in again:
                await delivery.settle(Done())

    async def test_a_consumer_that_is_cancelled_while_it_waits_loses_nothing(self, transport: Transport) -> None:
        await transport.declare([listener()])
        async with consuming(transport) as deliveries:
            for n in range(10):
                taking = asyncio.ensure_future(anext(deliveries))
                await asyncio.sleep(0)
                await transport.publish([message(body=str(n).encode())])
                for _ in range(n):
                    await asyncio.sleep(0)
                taking.cancel()
                [result] = await asyncio.gather(taking, return_exceptions=True)
                if isinstance(result, BaseException):
                    [result] = await take(deliveries)
                assert result.attempt.message.body == str(n).encode()
                await result.settle(Done())

    async def test_the_raw_message_is_there_for_listeners_that_ask(self, transport: Transport) -> None:
        await transport.declare([listener()])
        await transport.publish([message()])
        async with consuming(transport) as deliveries:
            [delivery] = await take(deliveries)
            assert delivery.raw is not None
            assert (delivery.completion() is not None) == transport.features.completes_in_transaction
            await delivery.settle(Done())

    async def test_messages_stay_when_the_transport_closes_and_opens(self, make_transport: MakeTransport) -> None:
        transport = make_transport()
        await transport.open()
        await transport.declare([listener()])
        await transport.publish([message(), message()])
        async with consuming(transport) as deliveries:
            [delivery] = await take(deliveries)
            delivery.settle(Done())
        await transport.close()
        await transport.open()
        assert len(await emptied(transport)) == 1
        await transport.close()

    async def test_outcomes_are_written_before_the_transport_closes(self, make_transport: MakeTransport) -> None:
        transport = make_transport()
        await transport.open()
        await transport.declare([listener()])
        await transport.publish([message() for _ in range(10)])
        async with consuming(transport) as deliveries:
            landed = [delivery.settle(Done()) for delivery in await take(deliveries, 10)]
        await transport.close()
        assert [future.result() for future in landed] == [True] * 10
        await transport.open()
        assert await emptied(transport, count=0) == []
        await transport.close()
