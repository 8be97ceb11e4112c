"""Quieting: what the client library logs of connections that a link supervises. The link reports it to observers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_supervised: ContextVar[bool] = ContextVar("outbox_supervised", default=False)
_logger = logging.getLogger("aiormq.connection")


class _OnlyForDebugging(logging.Filter):
    """Makes DEBUG of what is said about supervised connections; about others everything stays as it is."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not _supervised.get() or record.levelno <= logging.DEBUG:
            return True
        record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
        return _logger.isEnabledFor(logging.DEBUG)


_only_for_debugging = _OnlyForDebugging()


@contextmanager
def quieted() -> Iterator[None]:
    """Around the opening of a connection: the tasks that it starts inherit this."""
    _logger.addFilter(_only_for_debugging)
    token = _supervised.set(True)
    try:
        yield
    finally:
        _supervised.reset(token)
