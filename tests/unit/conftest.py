"""What the tests without servers share: properties with a fixed seed, and a place to emit that counts statements."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from sqlalchemy import Connection, Engine, create_engine, event, func, select
from sqlalchemy.pool import StaticPool

from outbox import Message, Outbox

# The same examples on every run: a failure that somebody else caused must not appear in your change.
# How long an example takes is the machine's affair.
settings.register_profile(
    "outbox",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("outbox")


class Emitting:
    """An outbox on a database in memory, with every statement that reached it."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        self.engine = engine
        self.outbox = Outbox(db_engine=engine, **options)
        self.statements: list[str] = []
        event.listen(engine, "before_cursor_execute", self._note)

    def emit(self, routing_key: Any = "order.created", body: Any = None, **options: Any) -> Message | None:
        """Emit in a transaction that commits unless the emit raises."""
        with self.engine.begin() as connection:
            return self.outbox.emit_sync(connection, routing_key, body, **options)

    def stored(self) -> int:
        """How many messages the table holds."""
        with self.engine.begin() as connection:
            return connection.scalar(select(func.count()).select_from(self.outbox.tables.messages)) or 0

    def row(self) -> Any:
        """The one message that was stored, as the table has it."""
        with self.engine.begin() as connection:
            return connection.execute(select(self.outbox.tables.messages)).one()

    def _note(self, connection: Connection, cursor: object, statement: str, *rest: object) -> None:
        self.statements.append(statement)


@pytest.fixture
def emitting() -> Iterator[Emitting]:
    """A place to emit without an event loop."""
    engine = create_engine("sqlite://", poolclass=StaticPool)
    yield Emitting(engine)
    engine.dispose()


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for temporary files that the account of the servers may enter too."""
    with tempfile.TemporaryDirectory(prefix="outbox-test-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield folder
        monkeypatch.undo()
