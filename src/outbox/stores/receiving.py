"""SqlReceiving: messages from outside, stored in their queue once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import ColumnElement, Connection, DateTime, String, bindparam, exists, insert, select
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from outbox.core.attempt import Reason
from outbox.core.kept_property import kept_property
from outbox.core.message import Message
from outbox.core.store import Receipt, Reception, Rows, Seal, Statement
from outbox.stores.dialect import SqlDialect
from outbox.stores.inbox import SealsBroken, SqlInbox
from outbox.stores.rows import GIVEN, history_line, placed_row
from outbox.stores.runner import Runner
from outbox.stores.tables import Tables
from outbox.stores.wakeup import Wakeup

_ABOUT_VALUES = ("22", "23")  # SQLSTATE's classes for data that cannot be kept


class PlacingStatements:
    """Statements that store messages in their queues."""

    def __init__(self, tables: Tables, dialect: SqlDialect) -> None:
        self._tables = tables
        self._dialect = dialect

    def place_all(self, connection: Connection, rows: Rows) -> None:
        """Write messages that have their queues, as one batch."""
        connection.execute(self.place, rows)

    def reception(self, queue: str, message: Message) -> Reception:
        """The statements for one message, in somebody else's transaction."""
        placed = placed_row(queue, message)

        def bury(reason: Reason, error: str) -> Statement:
            because = {"reason": reason.value, "error": error, "history": history_line("not delivered", error)}
            return self._bury, [placed | because]

        return Reception(
            enter=(self._enter, [{"queue": queue, "message_id": message.id}]),
            place=(self.place, [placed]),
            place_if_bound=(self._place_if_bound, [placed]),
            bury=bury,
        )

    @kept_property
    def _enter(self) -> Any:
        entry = self._dialect.ignoring(self._tables.inbox).values(entered_at=self._dialect.clock())
        return entry.execution_options(preserve_rowcount=True)

    @kept_property
    def place(self) -> Any:
        """Stores messages in their queues, due at once."""
        placing = insert(self._tables.messages).values(self._in_queue()).inline()
        return placing.execution_options(preserve_rowcount=True)

    @kept_property
    def _place_if_bound(self) -> Any:
        bindings = self._tables.bindings
        columns = self._as_given() | self._in_queue()
        bound = exists().where(bindings.c.queue == bindparam("queue", type_=String))
        source = select(*columns.values()).where(bound)
        placing = insert(self._tables.messages).from_select(list(columns), source)
        return placing.execution_options(preserve_rowcount=True)

    @kept_property
    def _bury(self) -> Any:
        died = {"died_at": self._dialect.clock()}
        burying = insert(self._tables.dead_letters).values(self._in_queue() | died).inline()
        return burying.execution_options(preserve_rowcount=True)

    def _in_queue(self) -> dict[str, ColumnElement[Any]]:
        return {
            "destination": bindparam("queue", type_=String),
            "expires_at": bindparam("expires", type_=DateTime(timezone=True)),
            "due_at": self._dialect.clock(),
            "routed_at": self._dialect.clock(),
        }

    def _as_given(self) -> dict[str, ColumnElement[Any]]:
        columns = self._tables.messages.c
        return {name: bindparam(name, type_=columns[name].type) for name in GIVEN}


class SqlReceiving:
    """An entry in the inbox first, and the message only if the entry is new: both commit together, or neither."""

    def __init__(self, runner: Runner, inbox: SqlInbox, placing: PlacingStatements, wakeup: Wakeup) -> None:
        self._runner = runner
        self._inbox = inbox
        self._placing = placing
        self._wakeup = wakeup

    async def receive(
        self, queue: str, messages: Sequence[Message], also: str | None, seals: Sequence[Seal] = ()
    ) -> Receipt:
        """Store what is new."""
        unique = list({message.id: message for message in messages}.items())
        try:
            receipt = await self._receive(queue, unique, also, seals)
        except SealsBroken as broken:
            return Receipt(broken=broken.seals)
        if receipt.stored:
            self._wakeup.announce(queue)
        return receipt

    async def _receive(
        self, queue: str, messages: Sequence[tuple[str, Message]], also: str | None, seals: Sequence[Seal]
    ) -> Receipt:
        try:
            return Receipt(
                await self._runner.transact(lambda connection: self._keep(connection, queue, messages, also, seals))
            )
        except Exception as error:
            if not is_about_values(error):
                raise
            if len(messages) == 1:
                return Receipt(refused={messages[0][0]: f"the database cannot hold it: {_words(error)}"})
        middle = len(messages) // 2
        first = await self._receive(queue, messages[:middle], also, seals)
        second = await self._receive(queue, messages[middle:], also, seals)
        return Receipt(first.stored | second.stored, {**first.refused, **second.refused})

    def _keep(
        self,
        connection: Connection,
        queue: str,
        messages: Sequence[tuple[str, Message]],
        also: str | None,
        seals: Sequence[Seal],
    ) -> frozenset[str]:
        ids = [id for id, _ in messages]
        with _encoding():
            if seals:
                new = self._inbox.sealed(connection, queue, ids, seals)
            else:
                new = frozenset(self._inbox.remember_all(connection, queue, ids, also=also))
            if new:
                placed = [placed_row(queue, message) for id, message in messages if id in new]
                self._placing.place_all(connection, placed)
        return new


class _Unencodable(Exception):
    """A driver cannot write a value down."""


@contextmanager
def _encoding() -> Iterator[None]:
    """Around statements: where there is no connection yet, the same errors tell of a certificate or a host's name."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise _Unencodable(str(error)) from error


def is_about_values(error: BaseException) -> bool:
    """Whether a statement failed for what it was to write, so that it will fail again."""
    if isinstance(error, DataError | IntegrityError | _Unencodable):
        return True
    if not isinstance(error, DBAPIError):
        return False
    state = getattr(error.orig, "sqlstate", None) or ""
    return state[:2] in _ABOUT_VALUES or isinstance(getattr(error.orig, "__cause__", None), ValueError)


def _words(error: BaseException) -> str:
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return str(cause).partition("\n")[0][:500]
