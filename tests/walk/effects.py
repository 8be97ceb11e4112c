"""The table in which listeners of the process tests leave their effects."""

from __future__ import annotations

from sqlalchemy import Column, Integer, MetaData, String, Table


def effects_table(table_name: str) -> Table:
    """It has no unique constraint, so that a second effect would be seen."""
    return Table(
        f"{table_name}_effects",
        MetaData(),
        Column("id", Integer, primary_key=True, autoincrement=True),
        Column("queue", String(64)),
        Column("body", Integer),
    )
