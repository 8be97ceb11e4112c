"""Serving: a relay's or worker's life as a process of its own."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from outbox.cli.asking import ask
from outbox.cli.exits import ExitCode
from outbox.core.listener import Listener
from outbox.instance import Outbox
from outbox.shutdown import on_signals

OBJECTS_BETWEEN_COLLECTIONS = 50_000  # Python's own is 700


def serve(
    outbox: Outbox,
    listeners: Sequence[Listener] | None = None,
    *,
    leftovers: bool = False,
    store_first: bool = False,
) -> None:
    """Work until a signal: as a worker if there are listeners, as a relay otherwise."""

    # What is loaded by now stays for good: the collector need not look through it again with every thousand messages.
    # And a batch is made and forgotten without a cycle in it: looking for some a dozen times in each is time lost.
    gc.collect()
    gc.freeze()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)

    async def working() -> None:
        # What Outbox.worker and Outbox.message_relay do, with the shutdown in hand: it knows of a second signal.
        with on_signals() as shutdown:
            if listeners is None:
                await outbox.run(shutdown, relay=True)
            elif await outbox.run(shutdown, listeners=listeners, leftovers=leftovers, store_first=store_first):
                _leave(ExitCode.FORCED if shutdown.forced.is_set() else ExitCode.ABANDONED)

    ask(outbox, working, makes_file=True, loop=_quick_loop())


def _quick_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    make: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return make


def _leave(code: ExitCode) -> NoReturn:
    """End at once. An abandoned listener may hold a thread that the interpreter would wait for without end."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
