"""Two services on one database: neither takes the other's messages without a word."""

from __future__ import annotations

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import Listener, Outbox
from outbox.core.attempt import Done
from outbox.core.events import Handled
from tests.conftest import MakeOutbox

from .strategies import Effects, Watch, emit

ORDERS = 10
ASYNCPG = pytest.mark.parametrize("database_url", ["postgresql+asyncpg"], indirect=True)


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
async def effects(outbox: Outbox, table_name: str) -> Effects:
    effects = Effects(outbox, table_name)
    await effects.create()
    return effects


def writing(effects: Effects, service: str, batch: int | None = None) -> Listener:
    """What each service calls `on_order`."""

    async def one(order: int, session: AsyncSession) -> None:
        await session.execute(effects.write(service, order))

    async def many(orders: list[int], session: AsyncSession) -> None:
        for order in orders:
            await session.execute(effects.write(service, order))

    return Listener("order.*", one if batch is None else many, queue="orders", batch=batch, retry_delays=())


# The inbox.


@ASYNCPG
@pytest.mark.parametrize("batch", [None, 5], ids=["single", "list"])
async def test_services_with_prefixes_of_their_own_each_get_every_message(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, rabbitmq_url: str, batch: int | None
) -> None:
    billing, shipping = (
        make_outbox(transport=rabbitmq_url, queue_prefix=f"{service}.", observers=[watch])
        for service in ("billing", "shipping")
    )
    async with (
        billing.running(relay=True, listeners=[writing(effects, "billing", batch)]),
        shipping.running(listeners=[writing(effects, "shipping", batch)]),
    ):
        await emit(billing, *range(ORDERS))
        ended = await watch.wait_for(Handled, 2 * ORDERS)
    assert all(isinstance(event.outcome, Done) for event in ended)
    assert sorted(await effects.all()) == ["billing"] * ORDERS + ["shipping"] * ORDERS


@ASYNCPG
async def test_what_was_handled_under_the_short_name_is_not_handled_again(
    make_outbox: MakeOutbox, watch: Watch, effects: Effects, rabbitmq_url: str
) -> None:
    """Entries that a version before made, or a worker that stored its deliveries first."""
    outbox = make_outbox(transport=rabbitmq_url, queue_prefix="billing.", observers=[watch])
    async with outbox.transaction() as session:
        known, new = [await outbox.emit(session, "order.created", number) for number in range(2)]
        assert known is not None and new is not None
        await session.run_sync(lambda plain: outbox.store.remember_all(plain.connection(), "orders", [known.id]))
    async with outbox.running(relay=True, listeners=[writing(effects, "billing")]):
        ended = await watch.wait_for(Handled, 2)
    assert {event.attempt.message.id for event in ended} == {known.id, new.id}
    assert await effects.all() == ["billing"]
