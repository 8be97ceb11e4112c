"""Emitter: writes messages in the caller's own transaction."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from outbox.core import body as bodies
from outbox.core.durations import Eta, Seconds, as_due, as_lifetime
from outbox.core.errors import HeaderInvalid, NotAtomicWarning, TimeInvalid, TransactionError
from outbox.core.events import Emitted, Observer
from outbox.core.message import Message, Schedule, check, check_timer_id
from outbox.core.store import Store
from outbox.outbound.commits import after_commit
from outbox.outbound.written import note

AnySession = AsyncSession | AsyncConnection | Session | Connection
Result = TypeVar("Result")
Key = str | Callable[[Any], str] | None


class Emitter:
    """Turns what callers say into messages and hands them to the store of the caller's database."""

    def __init__(
        self,
        store_for: Callable[[str], Store],
        *,
        expiration: timedelta | None,
        max_body_size: int,
        observe: Observer,
    ) -> None:
        self._store_for = store_for
        self._expiration = expiration
        self._max_body_size = max_body_size
        self._observe = observe

    def message(
        self,
        routing_key: str,
        body: object,
        *,
        key: Key = None,
        headers: Mapping[str, str] | None = None,
        content_type: str | None = None,
    ) -> Message:
        """A checked message."""
        encoded, default_type = bodies.encode(body, routing_key)
        message = Message(
            routing_key=routing_key,
            body=encoded,
            content_type=content_type or default_type,
            headers=_as_headers(headers),
            key=key(body) if callable(key) else key,
        )
        check(message, self._max_body_size)
        return message

    def schedule(self, eta: Eta | None, expiration: Seconds | None, timer_id: str | None) -> Schedule:
        """When a message is due and until when it is worth delivering."""
        if timer_id is not None:
            check_timer_id(timer_id)
        lifetime = self._expiration if expiration is None else as_lifetime(expiration)
        due = as_due(eta)
        if isinstance(due, datetime) and lifetime is not None and lifetime > datetime.max.replace(tzinfo=UTC) - due:
            raise TimeInvalid(f"expiration ends after the year 9999: {lifetime} from {due}")
        return Schedule(due=due, expiration=lifetime, timer_id=timer_id)

    def messages(self, routing_key: str, many: Iterable[object], **options: Any) -> list[Message]:
        """A checked message for each body."""
        return [self.message(routing_key, body, **options) for body in many]

    async def write(self, session: AnySession, messages: list[Message], schedule: Schedule) -> bool:
        """Write messages; False if the timer already waits."""
        return await in_session(session, self.write_now, messages, schedule)

    def write_now(self, session: Session | Connection, messages: list[Message], schedule: Schedule) -> bool:
        """The same for a caller without an event loop. Flushes nothing, commits nothing, begins nothing of its own."""
        if not messages:
            return True
        store, connection = self._store(session)
        statement, rows = store.insert(messages, schedule)
        written = store.write(connection, statement, rows)
        if schedule.timer_id is not None and not written:
            return False
        note(connection, store, messages, schedule)
        after_commit(session, lambda: store.announce(None))
        self._observe(Emitted(messages))
        return True

    async def cancel(self, session: AnySession, timer_id: str) -> bool:
        """Delete the timer if it still waits; says whether it did."""
        return await in_session(session, self.cancel_now, timer_id)

    def cancel_now(self, session: Session | Connection, timer_id: str) -> bool:
        check_timer_id(timer_id)
        store, connection = self._store(session)
        return store.write(connection, store.cancel(timer_id)) > 0

    def _store(self, session: Session | Connection) -> tuple[Store, Connection]:
        # Not session.execute(): SQLAlchemy 2.1 would flush, and a flush is the caller's to decide.
        connection = session.connection() if isinstance(session, Session) else session
        if _commits_by_itself(connection):
            warnings.warn(
                "emit on a connection in AUTOCOMMIT: the message is stored at once, whatever becomes of your data; "
                "use a connection with a transaction",
                NotAtomicWarning,
                stacklevel=2,
            )
        return self._store_for(connection.dialect.name), connection


def _as_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    if headers is not None and not isinstance(headers, Mapping):
        raise HeaderInvalid(f"headers are a mapping of names to values, not {type(headers).__name__}")
    return dict(headers or {})


async def in_session(session: AnySession, work: Callable[..., Result], *arguments: object) -> Result:
    """Run work that wants a plain session or connection on any kind of them."""
    match session:
        case AsyncSession() | AsyncConnection():
            return await session.run_sync(work, *arguments)
        case async_scoped_session() | scoped_session():
            return await in_session(session(), work, *arguments)
        case _:
            return work(plain(session), *arguments)


def plain(session: object) -> Session | Connection:
    """A session or connection that works without an event loop; everything else is refused with advice."""
    match session:
        case Session() | Connection():
            return session
        case scoped_session():
            found: Session = session()
            return found
        case AsyncSession() | AsyncConnection():
            raise TransactionError(f"{type(session).__name__} needs the event loop: use `await emit(…)`, not emit_sync")
        case _:
            raise TransactionError(
                f"cannot emit on {type(session).__name__!r}: pass the AsyncSession, Session, AsyncConnection or "
                "Connection whose transaction the message belongs to"
            )


def _commits_by_itself(connection: Connection) -> bool:
    level = connection.get_execution_options().get("isolation_level")
    if level is None:
        level = getattr(connection.dialect, "_on_connect_isolation_level", None)
    return level == "AUTOCOMMIT"
