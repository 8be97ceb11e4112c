"""Needs: which tests speak to a server."""

from __future__ import annotations

import pytest

_SERVERS = frozenset({"postgresql_url", "mariadb_url", "pgbouncer", "rabbitmq"})  # fixtures
_DATABASES = ("postgresql", "mariadb", "mysql", "wal")


def needs_server(item: pytest.Item) -> bool:
    """By its fixtures, by its database, or because it says that it starts one itself."""
    fixtures = {*getattr(item, "fixturenames", ())}
    if item.get_closest_marker("servers") or _SERVERS & fixtures:
        return True
    callspec = getattr(item, "callspec", None)
    parameters = callspec.params.values() if callspec is not None and "database_url" in fixtures else ()
    return any(isinstance(each, str) and each.startswith(_DATABASES) for each in parameters)
