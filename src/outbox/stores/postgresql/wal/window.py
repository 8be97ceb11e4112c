"""LogWindow: transactions that were decoded and are not settled yet, and the position that may be confirmed."""

from __future__ import annotations

from collections import deque


class LoggedTransaction:
    """One transaction of the log: how many of its rows are not settled, and where it ends."""

    __slots__ = ("committed_at", "end", "position", "unsettled", "xid")

    def __init__(self, xid: int, committed_at: int, position: int) -> None:
        self.xid = xid
        self.position = position  # of its commit
        self.committed_at = committed_at  # microseconds since 2000, by the server's clock
        self.unsettled = 0
        self.end: int | None = None  # none while its commit was not decoded


class LogWindow:
    """The transactions in commit order.

    A position is confirmed only at the end of a transaction, and only when that one and all before it are settled. A
    server that is told more would forget messages that were not delivered; one that is told a position within a
    transaction would send all of it again.
    """

    def __init__(self) -> None:
        self._open: deque[LoggedTransaction] = deque()
        self.confirmed = 0

    def begin(self, xid: int, committed_at: int, position: int = 0) -> LoggedTransaction:
        transaction = LoggedTransaction(xid, committed_at, position)
        self._open.append(transaction)
        return transaction

    def commit(self, transaction: LoggedTransaction, end: int) -> None:
        transaction.end = end
        self._advance()

    def settled(self, transaction: LoggedTransaction) -> None:
        """One of its rows needs nothing any more."""
        transaction.unsettled -= 1
        if not transaction.unsettled:
            self._advance()

    def sent_up_to(self, position: int) -> None:
        """The server has nothing before this position that it did not send."""
        if not self._open:
            self.confirmed = max(self.confirmed, position)

    @property
    def is_empty(self) -> bool:
        return not self._open

    def _advance(self) -> None:
        while self._open:
            first = self._open[0]
            if first.unsettled or first.end is None:
                return
            self.confirmed = max(self.confirmed, first.end)
            self._open.popleft()
