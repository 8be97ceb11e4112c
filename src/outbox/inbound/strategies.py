"""Strategies: what a listener's options say of one message, where they are functions."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from outbox.core.durations import as_lifetime, configured
from outbox.core.errors import ConfigurationError
from outbox.core.listener import Listener
from outbox.core.message import Message
from outbox.core.store import Store
from outbox.core.strategy import named_level


class TimeLimit:
    """How long one message may take, by the listener's `timeout`."""

    def __init__(self, listener: Listener, lease: timedelta | None) -> None:
        self._listener = listener
        self._lease = lease  # none: it is renewed whatever the listener does

    def __call__(self, message: Message, default: timedelta | None) -> timedelta | None:
        timeout = self._listener.timeout
        said = timeout(message) if callable(timeout) else timeout
        if said is None:
            return default
        limit = configured(as_lifetime, said, what="timeout")
        self.check(limit)
        return limit

    def check(self, limit: timedelta | None) -> None:
        """Refuse a limit that outlasts a lease which cannot be renewed meanwhile."""
        if limit is not None and self._lease is not None and limit >= self._lease:
            raise ConfigurationError(
                f"{self._listener.queue}: timeout={limit.total_seconds():g} s is not shorter than its lease of "
                f"{self._lease.total_seconds():g} s. SQLite lets nobody write while a listener's transaction is open, "
                "not even the renewal of its lease: lower the timeout or raise the lease"
            )


class Isolation:
    """What a listener's connection is told, by its `isolation_level`."""

    def __init__(self, listener: Listener, store: Store) -> None:
        self._level = listener.isolation_level
        self._store = store

    def __call__(self, message: Message) -> Mapping[str, Any]:
        return self._options(self._level(message)) if callable(self._level) else self.fixed

    @property
    def fixed(self) -> Mapping[str, Any]:
        """What it is told whatever the message is."""
        return {} if callable(self._level) else self._options(self._level)

    def _options(self, level: str | None) -> Mapping[str, Any]:
        return {} if level is None else self._store.isolation(named_level(level))
