"""Movies: the example that is documented. A producer keeps movies and tells of each, a consumer publishes them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Column, Insert, Integer, MetaData, String, Table, insert, select
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox import Message, Outbox

MOVIE_CREATED = "movie.movie_created"  # the project's aggregate type and message type


class Shelf:
    """A table of movies, in which the same movie twice would be seen."""

    def __init__(self, engine: AsyncEngine, name: str) -> None:
        self._engine = engine
        self.table = Table(
            name,
            MetaData(),
            Column("id", Integer, primary_key=True, autoincrement=True),
            Column("title", String(64), nullable=False),
        )

    async def create(self) -> None:
        async with self._engine.begin() as connection:
            await connection.run_sync(self.table.metadata.create_all)

    def put(self, title: str) -> Insert:
        return insert(self.table).values(title=title)

    async def titles(self) -> list[str]:
        async with self._engine.connect() as connection:
            return list(await connection.scalars(select(self.table.c.title).order_by(self.table.c.id)))


async def tell(outbox: Outbox, *titles: str, routing_key: str = MOVIE_CREATED, **options: Any) -> list[Message]:
    """A committed message for each movie."""
    async with outbox.transaction() as session:
        bodies = [{"title": title} for title in titles]
        return await outbox.emit_many(session, routing_key, bodies, **options)


def incoming(title: str = "some movie", routing_key: str = MOVIE_CREATED, **fields: Any) -> Message:
    """A message of another service, as a receiver has it in hand."""
    return Message(routing_key=routing_key, body=b'{"title":"%s"}' % title.encode(), **fields)


async def is_done(outbox: Outbox) -> bool:
    """Whether nothing of an outbox waits any more."""
    return not await outbox.messages()
