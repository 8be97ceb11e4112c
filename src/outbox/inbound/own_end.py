"""OwnEnd: keeps a listener from ending the transaction that the worker ends."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from sqlalchemy import event
from sqlalchemy.orm import Session

from outbox.core.errors import TransactionError


class OwnEnd:
    """Watches a listener's session. A commit of the listener's own would escape the delivery's: it is refused."""

    def __init__(self, session: Session) -> None:
        self._allowed = False
        self._rolled_back = False
        self._ended = False
        _watched[session] = self

    def allow(self) -> None:
        """From here on it is the worker who ends the transaction; too late if the listener did."""
        if self._rolled_back:
            raise TransactionError(
                "the listener rolled back its session: leave that to the worker and raise an exception instead, or use "
                "`session.begin_nested()` for a part"
            )
        self._allowed = True

    def end(self) -> None:
        """It is over: a task that the listener left behind commits nothing either."""
        self._ended = True

    def before_commit(self, session: Session) -> None:
        if self._ended:
            raise TransactionError("the listener's transaction has ended: whoever still has its session is too late")
        if not self._allowed and not session.in_nested_transaction():
            raise TransactionError(
                "the listener committed its session: leave that to the worker, who commits it together with the end of "
                "the message; what must be committed by itself needs a session of its own"
            )

    def after_rollback(self, session: Session) -> None:
        if not session.in_nested_transaction():
            self._rolled_back = True


# For all sessions at once: a session lives for a message, and to listen to each costs more than to pass over most.

_watched: WeakKeyDictionary[Session, OwnEnd] = WeakKeyDictionary()


@event.listens_for(Session, "before_commit")
def _before_commit(session: Session) -> None:
    if (own_end := _watched.get(session)) is not None:
        own_end.before_commit(session)


@event.listens_for(Session, "after_rollback")
def _after_rollback(session: Session) -> None:
    if (own_end := _watched.get(session)) is not None:
        own_end.after_rollback(session)
