"""Interrupting: cancels what is awaited where it waits for the n-th time, as a caller who gives up would."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any


class Interrupted:
    """Awaits a coroutine and cancels the task at its n-th suspension; afterwards tells whether it came to that."""

    def __init__(self, work: Coroutine[Any, Any, Any], at: int) -> None:
        self._work = work
        self._at = at
        self.suspensions = 0
        self.result: Any = None  # none if it was cancelled

    @property
    def happened(self) -> bool:
        return self.suspensions >= self._at

    def __await__(self) -> Generator[Any, Any, None]:
        awaiting = self._work.__await__()
        send: Any = lambda: next(awaiting)  # noqa: E731
        while True:
            try:
                waited_for = send()
            except StopIteration as end:
                self.result = end.value
                return
            self.suspensions += 1
            if self.suspensions == self._at:
                task = asyncio.current_task()
                assert task is not None
                # Once the task has begun to wait, hence not now.
                asyncio.get_running_loop().call_soon(task.cancel)
            try:
                answer = yield waited_for
                send = lambda: awaiting.send(answer)  # noqa: B023, E731
            except BaseException as error:  # noqa: BLE001 - whatever the task is told goes to the work
                thrown = error
                send = lambda: awaiting.throw(thrown)  # noqa: B023, E731


async def interrupted(work: Coroutine[Any, Any, Any], at: int) -> Interrupted:
    """Run work in a task of its own, cancelled at its n-th suspension. A cancellation that it swallows is a fault."""
    interruption = Interrupted(work, at)

    async def run() -> None:
        await interruption

    task = asyncio.create_task(run())
    await asyncio.wait([task])
    if interruption.happened:
        if not task.cancelled():
            task.result()
            raise AssertionError(f"the cancellation at suspension {at} was swallowed")
    else:
        task.result()
    return interruption
