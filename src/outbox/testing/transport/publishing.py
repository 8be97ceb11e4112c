"""TransportPublishingCases: what is confirmed has arrived, and goes where it is asked for."""

from __future__ import annotations

from outbox.core.attempt import Done
from outbox.core.transport import Transport
from outbox.testing.transport.cases import (
    TransportCases,
    check_declared_features,
    consuming,
    emptied,
    listener,
    message,
    skip_where,
    take,
)


class TransportPublishingCases(TransportCases):
    """What is confirmed has arrived, and goes where it is asked for."""

    async def test_it_has_a_name_of_one_word(self, transport: Transport) -> None:
        assert transport.name.isidentifier()

    async def test_its_features_say_what_it_can_do(self, transport: Transport) -> None:
        check_declared_features(transport)

    async def test_a_message_for_a_bound_queue_is_confirmed_and_delivered_unchanged(self, transport: Transport) -> None:
        await transport.declare([listener()])
        sent = message(
            "order.created",
            bytes(range(256)),
            content_type="application/x-thing",
            headers={"trace": "abc"},
            key="customer-1",
            tracking_ids=("first", "second"),
        )
        published = await transport.publish([sent])
        assert (published.confirmed, dict(published.refused)) == (frozenset({sent.id}), {})
        async with consuming(transport) as deliveries:
            [delivery] = await take(deliveries)
            assert delivery.attempt.message == sent
            assert (delivery.attempt.attempt_count, delivery.attempt.crash_count) == (1, 0)
            assert await delivery.settle(Done()) is True

    async def test_a_message_that_no_queue_is_bound_to_is_never_confirmed(self, transport: Transport) -> None:
        await transport.declare([listener()])
        bound, unbound = message("order.created"), message("user.created")
        published = await transport.publish([unbound, bound])
        assert published.confirmed == {bound.id}
        assert set(published.refused) == {unbound.id}
        assert not published.refused[unbound.id].permanent
        assert [found.id for found in await emptied(transport)] == [bound.id]

    async def test_publishing_nothing_is_harmless(self, transport: Transport) -> None:
        published = await transport.publish([])
        assert (published.confirmed, dict(published.refused)) == (frozenset(), {})

    async def test_a_message_goes_to_every_queue_that_asks_for_it(self, transport: Transport) -> None:
        skip_where(transport, "wildcards", False, "a listener names each routing key")
        await transport.declare([listener("a", "order.*"), listener("b", "#"), listener("c", "user.#")])
        sent = message("order.created")
        await transport.publish([sent])
        assert [found.id for found in await emptied(transport, "a")] == [sent.id]
        assert [found.id for found in await emptied(transport, "b")] == [sent.id]
        assert await emptied(transport, "c", 0) == []

    async def test_declaring_again_changes_nothing(self, transport: Transport) -> None:
        for _ in range(3):
            await transport.declare([listener("a"), listener("b", "x")])
        await transport.publish([message()])
        assert len(await emptied(transport, "a")) == 1

    async def test_many_messages_all_arrive(self, transport: Transport) -> None:
        await transport.declare([listener()])
        sent = [message(body=str(n).encode()) for n in range(300)]
        assert len((await transport.publish(sent)).confirmed) == 300
        async with consuming(transport, prefetch=50) as deliveries:
            bodies = set()
            for _ in sent:
                [delivery] = await take(deliveries)
                bodies.add(delivery.attempt.message.body)
                delivery.settle(Done())
        assert len(bodies) == 300

    async def test_a_message_that_is_too_large_is_refused_for_good(self, transport: Transport) -> None:
        skip_where(transport, "largest_message", None, "it has no limit of its own")
        largest = transport.features.largest_message
        assert largest is not None
        await transport.declare([listener()])
        fitting, too_large = message(body=b"x" * largest), message(body=b"x" * (largest + 1))
        published = await transport.publish([too_large, fitting])
        assert published.confirmed == {fitting.id}
        assert published.refused[too_large.id].permanent
