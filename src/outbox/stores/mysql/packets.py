"""Packets: how large a statement may be that a server takes. One that is larger costs its connection."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, text
from sqlalchemy.pool import Pool

from outbox.core.errors import BodyTooLarge
from outbox.core.store import Rows

LARGE = 128 * 1024  # bytes: no server is set to less than twice as much
_REST = 64 * 1024  # bytes that the rest of a statement may have
_ESCAPED = b"\0\n\r\x1a\"'\\"  # of these, each takes two bytes in a statement

_ASKED = text("SELECT @@max_allowed_packet")

_known: WeakKeyDictionary[Pool, int] = WeakKeyDictionary()


def largest_packet(connection: Connection) -> int:
    """How many bytes a statement may have on this connection."""
    return int(connection.scalar(_ASKED) or 0)


def largest_body(connection: Connection) -> int:
    """How many bytes a body may have, whatever they are."""
    return max(0, (largest_packet(connection) - _REST) // 2)


def check_packets(connection: Connection, rows: Rows) -> None:
    """Refuse a body that the server would not take, before its connection is lost to it."""
    for row in rows:
        body: Any = row.get("body")
        if body is None or len(body) < LARGE:
            continue
        pool = connection.engine.pool
        if pool not in _known:
            _known[pool] = largest_packet(connection)
        size = _REST + len(body) + sum(body.count(byte) for byte in _ESCAPED)
        if size > _known[pool]:
            raise BodyTooLarge(
                f"the body of {row.get('routing_key', '')!r} takes {size} bytes in a statement, and the server takes "
                f"no more than max_allowed_packet={_known[pool]}: raise that, or lower max_body_size"
            )
