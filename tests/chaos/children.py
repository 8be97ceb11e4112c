"""Children: processes that a listener or a producer forks, without a word to the library.

A child emits one message in a transaction of its own, through the engine that its parent has used before, and ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any
from uuid import uuid4

from sqlalchemy import insert

from outbox import Outbox
from tests.chaos.history import COMMITTED, ROLLED_BACK, UNKNOWN, Emitted, Historian
from tests.chaos.surroundings import Surroundings, historian
from tests.chaos.tables import account, orders

WITHIN = 60.0  # seconds in which a child gives up by itself
LONGEST = 90  # seconds after which it is killed: it heeds nothing any more


def fork(its_outbox: Outbox) -> None:
    """Have a child, and do not wait for it."""
    number = f"child {uuid4().hex}"
    process = os.fork()
    if process:
        historian().note("forked", number=number)
        threading.Thread(target=os.waitpid, args=(process, 0), daemon=True).start()
        return
    try:
        _live(its_outbox, number)
    finally:
        os._exit(0)


def _live(its_outbox: Outbox, number: str) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LONGEST)
    here = Surroundings.here()
    mark = here.children / number
    mark.touch()
    child = _Child(its_outbox, number, Historian(here.histories / f"{here.name} {number}.jsonl"))
    error = ""
    try:
        asyncio.run(child.emit(here.accounts > 0))
    except Exception as raised:  # noqa: BLE001 - drivers throw what they like, and a refusal is a good answer too
        error = f"{type(raised).__name__}: {raised}"
    child.tell_end(error)
    mark.unlink()


class _Child:
    """Says what it intends and what came of it, in a history of its own: its parent's may be locked for ever."""

    def __init__(self, its_outbox: Outbox, number: str, its_historian: Historian) -> None:
        self._outbox = its_outbox
        self._number = number
        self._historian = its_historian
        self._outcome = ROLLED_BACK

    async def emit(self, has_accounts: bool) -> None:
        body: dict[str, Any] = {"fate": "fine", "name": self._number}
        if has_accounts:
            body |= {"account": account(0), "amount": 0}
        async with asyncio.timeout(WITHIN):
            async with self._outbox.transaction() as session:
                await session.execute(insert(orders).values(number=self._number, messages=1))
                message = await self._outbox.emit(session, "order.placed", body)
                assert message is not None
                facts = Emitted.of(message, "fine").as_facts()
                self._historian.note("intends", number=self._number, messages=[facts], taken_back=[])
                self._outcome = UNKNOWN
            self._outcome = COMMITTED

    def tell_end(self, error: str) -> None:
        self._historian.note("ended", number=self._number, outcome=self._outcome, error=error)
