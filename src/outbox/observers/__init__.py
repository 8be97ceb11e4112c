"""Observers: what is told about the work, and to whom."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from outbox.core.events import Event, Observer

logger = logging.getLogger("outbox")


class Observers:
    """Several observers as one. An observer's error is logged and forgotten: it must not stop the work it watches."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def __call__(self, event: Event) -> None:
        for observer in self._observers:
            try:
                observer(event)
            except Exception:
                logger.exception("the observer %r failed", observer)

    @contextmanager
    def joined_by(self, observer: Observer) -> Iterator[None]:
        """Let one more hear what happens within this block."""
        self._observers = (*self._observers, observer)
        try:
            yield
        finally:
            self._observers = tuple(each for each in self._observers if each is not observer)
