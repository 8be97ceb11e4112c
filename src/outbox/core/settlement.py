"""Settlement: whether an outcome was written, known later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator


class Settlement:
    """What `settle` returns: a future that calls back at once, because there is one for every message."""

    __slots__ = ("_cancelled", "_then", "_written")

    def __init__(self) -> None:
        self._written: bool | None = None
        self._cancelled = False
        self._then: tuple[Callable[[Settlement], object], ...] = ()

    def done(self) -> bool:
        return self._cancelled or self._written is not None

    def cancelled(self) -> bool:
        """Whether it will not be known: it was settled before, or the transport closed and gave the message back."""
        return self._cancelled

    def result(self) -> bool:
        """Whether it was written; if not, the lease was lost, or the connection that the delivery came by."""
        if self._cancelled:
            raise asyncio.CancelledError
        if self._written is None:
            raise asyncio.InvalidStateError("the outcome is not written yet")
        return self._written

    def then(self, callback: Callable[[Settlement], object]) -> None:
        """Call back when it is known."""
        if self.done():
            callback(self)
        else:
            self._then = (*self._then, callback)

    def set_result(self, written: bool) -> None:
        if not self.done():
            self._written = written
            self._tell()

    def cancel(self) -> None:
        if not self.done():
            self._cancelled = True
            self._tell()

    def __await__(self) -> Generator[None, None, bool]:
        if not self.done():
            known = asyncio.Event()
            self.then(lambda _: known.set())
            yield from known.wait().__await__()
        return self.result()

    def _tell(self) -> None:
        for callback in self._then:
            callback(self)
