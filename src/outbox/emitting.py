"""Emitting: the functions that write messages in a caller's transaction, with and without an event loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from outbox.core.durations import Eta, Seconds
from outbox.core.kept_property import kept_property
from outbox.core.message import Message
from outbox.outbound.emitter import Key
from outbox.outbound.sessions import AnySession, PlainSession
from outbox.parts import Parts


class Emitting:
    """What an outbox offers to those who emit."""

    @kept_property
    def _parts(self) -> Parts:  # setup() assigns others
        return Parts.from_environment()

    async def emit(
        self,
        session: AnySession,
        routing_key: str,
        body: object,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        eta: Eta | None = None,
        expiration: Seconds | None = None,
        timer_id: str | None = None,
        content_type: str | None = None,
        source: str | None = None,
    ) -> Message | None:
        """Store a message in the session's own transaction; None if the timer already waits.

        The session may be SQLAlchemy's, or a connection of SQLAlchemy, asyncpg, psycopg, aiosqlite or asyncmy. With a
        driver's raw connection the library cannot see the commit, so it sends no NOTIFY: on PostgreSQL the message is
        found by the next poll, at most `poll_interval` later.
        """
        emitter = self._parts.emitter
        message = emitter.message(routing_key, body, key, headers, content_type, source)
        schedule = emitter.schedule(eta, expiration, timer_id)
        return message if await emitter.write(session, [message], schedule) else None

    def emit_sync(
        self,
        session: PlainSession,
        routing_key: str,
        body: object,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        eta: Eta | None = None,
        expiration: Seconds | None = None,
        timer_id: str | None = None,
        content_type: str | None = None,
        source: str | None = None,
    ) -> Message | None:
        """`emit` for callers without an event loop.

        The session may be a plain one of SQLAlchemy, or a connection of SQLAlchemy, psycopg, sqlite3, pymysql,
        mysqlclient or Django.
        """
        emitter = self._parts.emitter
        message = emitter.message(routing_key, body, key, headers, content_type, source)
        schedule = emitter.schedule(eta, expiration, timer_id)
        return message if emitter.write_now(session, [message], schedule) else None

    async def emit_many(
        self,
        session: AnySession,
        routing_key: str,
        bodies: Iterable[object],
        *,
        key: Key = None,
        headers: Mapping[str, str] | None = None,
        eta: Eta | None = None,
        expiration: Seconds | None = None,
        content_type: str | None = None,
        source: str | None = None,
    ) -> list[Message]:
        """A message for each body, in one statement. `key` may be a function of the body."""
        emitter = self._parts.emitter
        messages = [emitter.message(routing_key, body, key, headers, content_type, source) for body in bodies]
        await emitter.write(session, messages, emitter.schedule(eta, expiration, None))
        return messages

    def emit_many_sync(
        self,
        session: PlainSession,
        routing_key: str,
        bodies: Iterable[object],
        *,
        key: Key = None,
        headers: Mapping[str, str] | None = None,
        eta: Eta | None = None,
        expiration: Seconds | None = None,
        content_type: str | None = None,
        source: str | None = None,
    ) -> list[Message]:
        """`emit_many` for callers without an event loop."""
        emitter = self._parts.emitter
        messages = [emitter.message(routing_key, body, key, headers, content_type, source) for body in bodies]
        emitter.write_now(session, messages, emitter.schedule(eta, expiration, None))
        return messages

    async def cancel_timer(self, session: AnySession, timer_id: str) -> bool:
        """Delete the message with this timer id if it still waits; says whether it did."""
        return await self._parts.emitter.cancel(session, timer_id)

    def cancel_timer_sync(self, session: PlainSession, timer_id: str) -> bool:
        """`cancel_timer` for callers without an event loop."""
        return self._parts.emitter.cancel_now(session, timer_id)
