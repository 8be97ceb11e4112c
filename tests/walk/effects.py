"""Tables in which listeners leave their effects, without a unique constraint, so that a second one would be seen."""

from __future__ import annotations

from sqlalchemy import Column, Integer, MetaData, String, Table, select

from outbox import Outbox


def effects_table(table_name: str) -> Table:
    """For those of the process tests."""
    return Table(
        f"{table_name}_effects",
        MetaData(),
        Column("id", Integer, primary_key=True, autoincrement=True),
        Column("queue", String(64)),
        Column("body", Integer),
    )


def numbers_table(table_name: str) -> Table:
    """For listeners that write a number."""
    return Table(f"{table_name}_effects", MetaData(), Column("id", Integer, primary_key=True), Column("n", Integer))


async def made(outbox: Outbox, table: Table) -> Table:
    async with outbox.engines.asynchronous.begin() as connection:
        await connection.run_sync(table.metadata.create_all)
    return table


async def written(outbox: Outbox, numbers: Table) -> list[int]:
    async with outbox.transaction() as session:
        return list(await session.scalars(select(numbers.c.n).order_by(numbers.c.n)))
