"""Begin: the first step of a coroutine, made at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any


def begin(coroutine: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
    """A task whose first step is over when this returns; asyncio's own would take it when the caller next waits.

    That step runs as part of whatever runs now: it must not ask for its own task, as a timeout would, nor speak through
    SQLAlchemy, which would come back to whoever is at work now.
    """
    loop = asyncio.get_running_loop()
    try:
        waits_for = coroutine.send(None)
    except StopIteration:
        over: asyncio.Future[None] = loop.create_future()
        over.set_result(None)
        return over
    return loop.create_task(_Begun(coroutine, waits_for))


class _Begun(Coroutine[Any, Any, None]):
    """The rest of it, as a task sees it: a coroutine that first waits for what the first step waits for."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._first = [waits_for]

    def send(self, value: Any) -> Any:
        return self._first.pop() if self._first else self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        self._first.clear()  # it was told to go on without
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, None]:
        raise TypeError("only a task runs it")
