"""Needs: which tests speak to a server."""

from __future__ import annotations

import pytest

_SERVERS = frozenset({"postgresql_url", "mariadb_url", "pgbouncer", "rabbitmq"})  # fixtures
_WITHOUT = "sqlite"


def needs_server(item: pytest.Item) -> bool:
    """By its fixtures, by its database, or because it says that it starts one itself."""
    if item.get_closest_marker("servers") or _SERVERS & {*getattr(item, "fixturenames", ())}:
        return True
    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("database_url", _WITHOUT) != _WITHOUT
