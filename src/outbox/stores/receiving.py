"""SqlReceiving: messages from outside, stored in their queue once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from outbox.core.message import Message
from outbox.core.store import Receipt, Seal
from outbox.stores.callers import PlacingStatements
from outbox.stores.inbox import SealsBroken, SqlInbox
from outbox.stores.rows import placed_row
from outbox.stores.runner import Runner
from outbox.stores.wakeup import Wakeup

_ABOUT_VALUES = ("22", "23")  # SQLSTATE's classes for data that cannot be kept


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
