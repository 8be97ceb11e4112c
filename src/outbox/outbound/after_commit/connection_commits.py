"""ConnectionCommits: what waits for the commit of a connection's own transaction, with and without a session on it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

from sqlalchemy import Connection, event

from outbox.outbound.after_commit.waiting import Aborted, Waiting


class ConnectionCommits:
    """One connection's transaction, savepoint by savepoint. The event of a savepoint does not tell its name."""

    def __init__(self) -> None:
        self.aborted: Aborted | None = None  # asked before a commit
        self._levels = [Waiting()]

    @property
    def innermost(self) -> Waiting:
        return self._levels[-1]

    def began(self) -> None:
        self._levels.append(Waiting())

    def released(self) -> None:
        if len(self._levels) > 1:  # otherwise it was begun before there was anything to wait for
            ended = self._levels.pop()
            self.innermost.take(ended)

    def rolled_back_to(self) -> None:
        if len(self._levels) > 1:
            self._levels.pop()
        else:
            self.rolled_back()

    def rolled_back(self) -> None:
        self._levels = [Waiting()]

    def committed(self) -> None:
        while len(self._levels) > 1:
            self.released()
        everything = self.innermost
        self.rolled_back()
        everything.run()


_known: WeakKeyDictionary[Connection, ConnectionCommits] = WeakKeyDictionary()


def waiting_on(connection: Connection) -> Waiting:
    """What waits for the end of the savepoint in which a connection is, or of its transaction."""
    return commits_on(connection).innermost


def commits_on(connection: Connection) -> ConnectionCommits:
    """What is known of a connection's transactions."""
    commits = _known.get(connection)
    if commits is None:
        commits = _known[connection] = ConnectionCommits()
        _listen(connection)
    return commits


def _listen(connection: Connection) -> None:
    """Hear of the ends of a connection's transactions and savepoints."""
    event.listen(connection, "savepoint", lambda connection, _: _known[connection].began())
    event.listen(connection, "release_savepoint", lambda connection, *_: _known[connection].released())
    event.listen(connection, "rollback_savepoint", lambda connection, *_: _known[connection].rolled_back_to())
    event.listen(connection, "rollback", lambda connection: _known[connection].rolled_back())
    event.listen(connection, "rollback_twophase", lambda connection, *_: _known[connection].rolled_back())
    # The event of a commit comes before it, and the commit may yet fail. Behind it SQLAlchemy tells nothing.
    for name in ("_commit_impl", "_commit_twophase_impl"):
        setattr(connection, name, _telling(ref(connection), getattr(type(connection), name)))


def _telling(connection: ref[Connection], commit: Any) -> Any:
    def committed(*arguments: Any) -> None:
        own = cast(Connection, connection())  # it is the one that calls
        commits = _known[own]
        error = None if commits.aborted is None else commits.aborted(own)
        if error is not None:
            with suppress(Exception):  # SQLAlchemy takes it for ended, and sends nothing more
                own._rollback_impl()
            raise error
        commit(own, *arguments)
        commits.committed()

    return committed
