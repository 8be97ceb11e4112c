"""LogBuffer: rows that were decoded and wait to be claimed, in commit order and up to a size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from outbox.stores.postgresql.wal.inserted_row import InsertedRow
from outbox.stores.postgresql.wal.window import LoggedTransaction, LogWindow

MOST_BYTES = 8 * 1024 * 1024  # of rows that are decoded and not settled; then the stream is paused
MOST_ROWS = 10_000  # the same


class LoggedMessage:
    """A row of the log on its way to the transport."""

    __slots__ = ("doubtful", "is_settled", "row", "transaction", "window")

    def __init__(self, row: InsertedRow, transaction: LoggedTransaction, window: LogWindow, *, doubtful: bool) -> None:
        self.row = row
        self.transaction = transaction
        self.window = window  # of the connection that it came by
        self.is_settled = False
        self.doubtful = doubtful  # committed before the slot was taken: an earlier holder may have settled it


class LogBuffer:
    """The rows of one connection. Those that are claimed count until they are settled."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed  # called when there is something to claim, or room to read
        self._waiting: deque[LoggedMessage] = deque()
        self.window = LogWindow()
        self._bytes = 0
        self._rows = 0

    def renew(self) -> LogWindow:
        """Forget everything: a new connection sends again what was not confirmed."""
        self._waiting.clear()
        self.window = LogWindow()
        self._bytes = self._rows = 0
        return self.window

    @property
    def has_room(self) -> bool:
        return self._bytes < MOST_BYTES and self._rows < MOST_ROWS

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def add(self, message: LoggedMessage) -> None:
        self.hold(message)
        self._waiting.append(message)
        if len(self._waiting) == 1:
            self._changed()

    def hold(self, message: LoggedMessage) -> None:
        """Count a row that no relay is to claim, until it is settled."""
        message.transaction.unsettled += 1
        self._rows += 1
        self._bytes += message.row.size

    def take(self, limit: int, most_bytes: int) -> list[LoggedMessage]:
        """The next ones, up to so many and so many bytes; one at least. No id is among them twice."""
        taken: list[LoggedMessage] = []
        ids: set[int] = set()
        size = 0
        while self._waiting and len(taken) < limit:
            row = self._waiting[0].row
            size += row.size
            if taken and (size > most_bytes or row.id in ids):
                break
            ids.add(row.id)
            taken.append(self._waiting.popleft())
        return taken

    def give_back(self, messages: Sequence[LoggedMessage]) -> None:
        """Put claimed ones back where they were: in front. Those of an earlier connection come again by themselves."""
        self._waiting.extendleft(reversed([each for each in messages if each.window is self.window]))
        self._changed()

    def settle(self, message: LoggedMessage) -> None:
        """Nothing is to be done for it any more, once the log may forget it."""
        if message.is_settled:
            return
        message.is_settled = True
        message.window.settled(message.transaction)
        if message.window is self.window:
            self._rows -= 1
            self._bytes -= message.row.size
            self._changed()
