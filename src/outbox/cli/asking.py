"""Asking: one conversation with the database, and what is said when it does not answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from sqlalchemy import URL
from sqlalchemy.exc import SQLAlchemyError

from outbox.cli.exits import ExitCode, Failure
from outbox.core.reaching import REFUSED, is_unreachable, original, sql_state
from outbox.instance import Outbox
from outbox.stores.sqlite import in_memory

Answer = TypeVar("Answer")


def ask(
    outbox: Outbox,
    question: Callable[[], Awaitable[Answer]],
    *,
    makes_file: bool = False,
    needs_tables: bool = True,
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> Answer:
    """Ask, let go of the connections, and answer; Failure where the database cannot be reached."""
    needs_tables = needs_tables and not makes_file

    async def asking() -> Answer:
        try:
            if needs_tables and outbox.engines.configured and not await outbox.store.maintenance.has_tables():
                raise Failure(ExitCode.WRONG, _no_tables(outbox))
            return await question()
        finally:
            await outbox.close()

    if not makes_file:
        _check_file(outbox)
    try:
        with asyncio.Runner(loop_factory=loop) as runner:
            return runner.run(asking())
    except BrokenPipeError:
        raise
    except (SQLAlchemyError, OSError) as error:
        raise explained(error, outbox) from None
    except Exception as error:
        if sql_state(error):  # drivers that SQLAlchemy does not hear out
            raise explained(error, outbox) from None
        raise


def _no_tables(outbox: Outbox) -> str:
    name = outbox.tables.messages.fullname
    return f"this database has no table {name}: `outbox tables create` would make it; is it the right database?"


def explained(error: Exception, outbox: Outbox) -> Failure:
    """What a database's error means for the user of the command."""
    words, state = _words(error), sql_state(error)
    if state == REFUSED:
        return Failure(ExitCode.CONFIGURATION, f"the database does not allow it: {words}")
    if is_unreachable(error):
        return Failure(ExitCode.UNREACHABLE, f"cannot reach the database {place(outbox.engines.main.url)}: {words}")
    return Failure(ExitCode.WRONG, f"the database says: {words}")


def place(url: URL) -> str:
    """Where a database is, without who logs in there."""
    if url.host is None:
        return url.database or "in memory"
    host = url.host.rpartition("@")[2]  # before it stands the rest of a password that was not quoted
    port = "" if url.port is None else f":{url.port}"
    return f"{host}{port}/{url.database or ''}"


def _check_file(outbox: Outbox) -> None:
    """SQLite would make the file that a mistyped path names, and then find nothing in it."""
    if not outbox.engines.configured:
        return
    url = outbox.engines.main.url
    if url.get_backend_name() != "sqlite" or in_memory(url) or (url.database or "").startswith("file:"):
        return
    if not Path(url.database or "").exists():
        raise Failure(ExitCode.UNREACHABLE, f"there is no file {url.database}; `outbox tables create` would make it")


def _words(error: Exception) -> str:
    text = str(original(error)).strip() or type(error).__name__
    return re.sub(r"^<class '[^']*'>: ", "", text.splitlines()[0])
