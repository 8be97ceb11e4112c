"""Django: what the open transaction of a connection of Django's has emitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, tzinfo
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

from sqlalchemy import Dialect, Select

from outbox.core.errors import TransactionError
from outbox.outbound.sessions import WrittenMessages


def written(connection: Any) -> list[WrittenMessages]:
    """The emits of the open transaction: Django forgets a hook with its savepoint, and all hooks at the end."""
    if not connection.in_atomic_block and not connection.get_autocommit():
        raise TransactionError("with autocommit off, Django shows what was emitted only inside `transaction.atomic()`")
    hooks = (entry[1] for entry in connection.run_on_commit)
    return [hook for hook in hooks if isinstance(hook, WrittenMessages)]


def rows(connection: Any, dialect: Dialect, statement: Select[Any]) -> list[SimpleNamespace]:
    """What a SELECT finds, with Python's own types."""
    compiled: Any = statement.compile(dialect=dialect, compile_kwargs={"render_postcompile": True})
    zone = ZoneInfo(connection.timezone_name) if connection.features.supports_timezones else UTC
    with connection.cursor() as cursor:
        cursor.execute(compiled.string, [compiled.params[name] for name in compiled.positiontup])
        names = [column[0] for column in cursor.description]
        return [SimpleNamespace(**dict(zip(names, _typed(row, zone), strict=True))) for row in cursor.fetchall()]


def _typed(row: Sequence[Any], zone: tzinfo) -> Iterator[Any]:
    """Without USE_TZ the times of Django's connections have no zone; bytes of psycopg2 are a view of memory."""
    for value in row:
        if isinstance(value, datetime) and value.tzinfo is None:
            yield value.replace(tzinfo=zone)
        else:
            yield bytes(value) if isinstance(value, memoryview) else value
