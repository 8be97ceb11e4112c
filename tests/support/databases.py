"""Databases: where a test runs, by the name of SQLAlchemy's dialect and driver."""

from __future__ import annotations

from pathlib import Path

import pytest

_FIXTURES = {"postgresql": "postgresql_url", "mysql": "mariadb_url", "mariadb": "mariadb_url"}


def url_on(request: pytest.FixtureRequest, name: str, folder: Path) -> str:
    """The URL of a database: a file in the folder, or the server of the run through this driver."""
    if name == "sqlite":
        return f"sqlite+aiosqlite:///{folder / 'outbox.db'}"
    url: str = request.getfixturevalue(_FIXTURES[name.partition("+")[0]])
    server, _, address = url.partition("://")
    return f"{name.replace('mariadb', server)}://{address}"
