"""PostgresqlWakeup: wakes other processes by NOTIFY after a commit, and is woken by theirs."""

from __future__ import annotations

from contextlib import suppress

from outbox.core.errors import ConfigurationError
from outbox.core.loops import running_loop
from outbox.stores.dialect import SqlDialect
from outbox.stores.postgresql import notifying_thread
from outbox.stores.postgresql.callers import PostgresqlCallers
from outbox.stores.postgresql.notify import Notifier
from outbox.stores.postgresql.plain_connection import PlainLine
from outbox.stores.postgresql.runner import PostgresqlRunner
from outbox.stores.tables import NOT_ROUTED, Tables
from outbox.stores.wakeup import Wakeup


class PostgresqlWakeup(Wakeup):
    """A notifier for each event loop, and a thread of ours for callers without one."""

    def __init__(
        self, tables: Tables, dialect: SqlDialect, runner: PostgresqlRunner, callers: PostgresqlCallers
    ) -> None:
        super().__init__()
        self._tables = tables
        self._dialect = dialect
        self._runner = runner
        self._callers = callers
        self.notifies_in_thread = True
        self._quiet: set[str] = set()  # destinations of which nothing was heard since a claim found nothing

    async def listen(self, longest: float) -> None:
        await self.notifier.listen(longest)

    def announce(self, *destinations: str | None) -> None:
        names = {destination or NOT_ROUTED for destination in destinations}
        self._quiet -= names
        super().announce(*destinations)
        self._notify(names)

    def is_quiet(self, destination: str) -> bool:
        """Whether a claim found nothing here, and nothing was heard since."""
        return destination in self._quiet

    def found(self, destination: str, anything: bool) -> None:
        """What a claim found."""
        (self._quiet.discard if anything else self._quiet.add)(destination)

    def heard(self, destination: str) -> None:
        """Another process has work for this destination."""
        self._quiet.discard(destination)
        self.ring(destination)

    def heard_everything(self) -> None:
        """Nobody listened until now: there may be work for anybody."""
        self._quiet.clear()
        self.ring_all()

    @property
    def notifier(self) -> Notifier:
        """The running loop's."""
        in_loop = self._runner.loops.here()
        if in_loop.notifier is None:
            in_loop.notifier = Notifier(self._tables, self._dialect, self._runner, in_loop.direct, self)
        return in_loop.notifier

    def _notify(self, destinations: set[str]) -> None:
        """Wake other processes, from an event loop of this one, or from a thread of ours where there is none."""
        loop = running_loop()
        has_engine = bool(self._runner.driver)
        if loop is None or loop not in self._runner.loops:
            # A loop that lasts speaks for one that may not.
            for other, in_loop in self._runner.loops.elsewhere().items():
                with suppress(RuntimeError):  # it was closed meanwhile
                    if in_loop.notifier is None or not in_loop.notifier.is_pending(destinations):
                        other.call_soon_threadsafe(self.notify_here, destinations)
                    return
        if loop is not None and has_engine:
            self.notify_here(destinations)
        elif self.notifies_in_thread and (has_engine or self._callers.engine is not None):
            notifying_thread.thread.notify(self, destinations)

    def notify_here(self, destinations: set[str]) -> None:
        """Wake other processes from the running event loop."""
        self.notifier.notify(destinations)

    def plain_line(self) -> PlainLine:
        """A connection beside the engine of callers, where this store has none of its own."""
        engine = None if self._callers.engine is None else self._callers.engine()
        if engine is None:
            raise ConfigurationError("the engine of the callers is gone")
        return PlainLine(engine, self._callers.on)
