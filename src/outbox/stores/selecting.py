"""SqlSelecting: the one place that chooses due rows and leases them, no more than can be fetched in time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from sqlalchemy import (
    BigInteger,
    Boolean,
    ColumnElement,
    Connection,
    DateTime,
    Executable,
    Float,
    Integer,
    Row,
    Select,
    bindparam,
    case,
    cast,
    func,
    not_,
    select,
)

from outbox.core.durations import EARLIEST
from outbox.core.kept_property import kept_property
from outbox.core.store import Selection, Suspected
from outbox.stores.dialect import SqlDialect
from outbox.stores.leases import one_more, set_in_order, unleased
from outbox.stores.rows import CLAIMED, ClaimedRow, as_seconds
from outbox.stores.runner import Runner
from outbox.stores.tables import NOT_ROUTED, Tables

# Weight: how many messages of a destination a claim may take, by how large they are.
# The statement that claims them adds up their sizes, so that no claim fetches more than it may. What is known of
# earlier ones only keeps it from looking at more than it will take.
# A claim that is not fetched within the time for a piece of work takes nothing. Over a slow connection a batch of
# large messages would be asked for again and again, and never come.

AIM = 8 * 1024 * 1024  # bytes of bodies, headers and tracking ids in a claim
SMALLEST_AIM = 64 * 1024  # the same after claims that were not fetched in time
QUICK = 10.0  # seconds: after a claim that was as large as it might be and took no longer, the aim doubles


class Weight:
    """What the messages of one destination weigh, by those that were claimed, and how much is fetched in time."""

    def __init__(self) -> None:
        self._aim = AIM
        self._average: float | None = None  # bytes; none: nothing is known
        self._too_slow = False

    @property
    def most(self) -> int:
        """Bytes of the next claim; a message that is larger comes alone."""
        return self._aim

    def limit(self, wanted: int) -> int:
        """How many messages to claim where so many are wanted."""
        if self._average is None:
            return min(1, wanted) if self._too_slow else wanted
        return min(wanted, max(1, int(self._aim / max(self._average, 1.0))))

    def took(self, count: int, size: int, seconds: float) -> None:
        """So many messages came, with bodies of so many bytes, in this time."""
        mean = size / count
        if self._average is None:
            self._average = mean
        else:
            self._average = max(mean, (self._average + mean) / 2)
            if seconds <= QUICK and size + mean > self._aim:
                self._aim = min(AIM, self._aim * 2)

    def took_too_long(self) -> None:
        """A claim was not fetched in time. The next one takes one message, which tells what they weigh now."""
        self._aim = max(SMALLEST_AIM, self._aim // 2)
        self._average = None
        self._too_slow = True


def how_many_fit(sizes: Iterable[int | None], most: int) -> int:
    """How many messages, from the first on, have no more bytes than `most`; at least one."""
    count = total = 0
    for size in sizes:
        total += size or 0
        if count and total > most:
            break
        count += 1
    return count


NEVER = -(2**31)  # crashes that no message has: one that found no queue has fewer starts than attempts


class Tokens(NamedTuple):
    """What rows of one claim are leased by."""

    token: UUID
    apart: UUID  # of what is not started yet

    @classmethod
    def new(cls) -> Tokens:
        token = uuid4()
        return cls(token, UUID(int=token.int ^ 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class StraightRoute:
    """What a statement must know to route and lease by itself."""

    limit: int
    largest_bytes: int
    version: int  # of the bindings by which the queues are known
    queues: Mapping[str, str]  # the queue of each routing key that goes to one alone
    rooms: Mapping[str, int]  # how many each queue takes
    lease: timedelta
    token: UUID
    since: datetime | None = None  # as of a selection


class StraightRouted(NamedTuple):
    """What such a statement has leased."""

    found: int  # how many messages were due: those that are not among the leased it left alone
    leased: Mapping[str, Sequence[ClaimedRow]]  # by queue


class SqlSelecting:
    """Locks what it finds, updates it by its ids, and reads it: for databases whose `apply` is a transaction."""

    def __init__(self, tables: Tables, dialect: SqlDialect, runner: Runner) -> None:
        self._messages = tables.messages
        self._dialect = dialect
        self._runner = runner

    async def anything_due(self, selection: Selection) -> bool:
        """Whether a claim is worth its locks. Where looking costs as much as claiming, it always is."""
        return True

    def search(self, connection: Connection, statement: Executable, selection: Selection) -> Sequence[Row[Any]]:
        """Run a statement that is built on `due` and answers with `due_at` first."""
        return connection.execute(statement, due_parameters(selection)).all()

    def take(self, connection: Connection, selection: Selection, tokens: Tokens) -> Sequence[ClaimedRow]:
        """Lease due messages."""
        ids = self._chosen(self.search(connection, self.due, selection), selection)
        return self._take(connection, ids, lease_parameters(selection, tokens)) if ids else []

    def _take(self, connection: Connection, ids: Sequence[int], terms: Mapping[str, Any]) -> Sequence[ClaimedRow]:
        chosen = {"ids": self._dialect.listed(ids)}
        connection.execute(self._lease, {**terms, **chosen})
        leased: Any = connection.execute(self._leased, {"apart": terms["apart"], **chosen}).all()
        return leased  # type: ignore[no-any-return]

    def _chosen(self, found: Sequence[Row[Any]], selection: Selection) -> list[int]:
        chosen = found
        if selection.suspected is not Suspected.ALL:
            first = next((row.id for row in found if row.suspected), None)
            chosen = [row for row in found if not row.suspected or row.id == first]
        largest = AIM if selection.largest_bytes is None else selection.largest_bytes
        return [row.id for row in chosen[: how_many_fit((row.size for row in chosen), largest)]]

    async def route_straight(self, route: StraightRoute, hold: Callable[[StraightRouted], None]) -> None:
        """Route and lease due messages whose queues are known, for databases that can in one statement."""

    @kept_property
    def due(self) -> Select[Any]:
        """Due messages of a destination in the order in which they are claimed, locked as they are found."""
        return self._due()

    def _due(self) -> Select[Any]:
        columns = self._messages.c
        suspected = columns.starts > columns.attempts  # some start of it never ended
        since = bindparam("since", type_=DateTime(timezone=True))
        return self._dialect.skipping_locked(
            select(
                self._dialect.readable(columns.due_at, EARLIEST).label("due_at"),
                columns.id,
                suspected.label("suspected"),
                columns.routing_key,
                self._row_size.label("size"),
            )
            .where(
                columns.destination == bindparam("wanted"),
                columns.done_at.is_(None),
                columns.due_at >= func.coalesce(since, self._dialect.before_all()),
                columns.due_at <= self._dialect.now(),
                unleased(self._messages, self._dialect.now()),
                bindparam("suspected", type_=Boolean) | not_(suspected),
                *self._further(),
            )
            .order_by(columns.due_at, columns.id)
            .limit(bindparam("limit"))
        )

    def _further(self) -> tuple[ColumnElement[bool], ...]:
        """What else must hold of a row that is claimed."""
        return ()

    @property
    def _row_size(self) -> ColumnElement[int]:
        """Bytes that a row brings with it: another program may write as much into its texts as into its body."""
        columns, size = self._messages.c, self._dialect.size
        return size(columns.body) + size(columns.headers) + size(columns.tracking_ids)

    @kept_property
    def _lease(self) -> Any:
        return self._leasing(self._dialect.among(self._messages.c.id, "ids"))

    @kept_property
    def _leased(self) -> Any:
        return select(*self._told(self._isolated)).where(self._dialect.among(self._messages.c.id, "ids"))

    def _leasing(self, chosen: ColumnElement[bool], **further: Any) -> Any:
        """Leases rows. Isolated attempts are leased by a token of their own, and their start is not counted yet."""
        columns = self._messages.c
        apart = bindparam("apart", type_=columns.lease_token.type)
        in_time = columns.expires_at.is_(None) | (columns.expires_at > self._dialect.now())
        crashes = cast(columns.starts, BigInteger) - columns.attempts  # a row may hold whatever fits into its columns
        isolated = (crashes == bindparam("isolated_at", type_=Integer)) & in_time
        return set_in_order(
            self._dialect.update(self._messages).where(chosen),
            lease_token=case((isolated, apart), else_=bindparam("token", type_=columns.lease_token.type)),
            lease_until=self._lease_until,
            starts=case((isolated, columns.starts), else_=one_more(columns.starts)),
            **further,
        )

    @property
    def _lease_until(self) -> ColumnElement[Any]:
        return self._dialect.later(self._dialect.now(), bindparam("lease", type_=Float))

    @property
    def _isolated(self) -> ColumnElement[bool]:
        token = self._messages.c.lease_token
        return token == bindparam("apart", type_=token.type)

    def _told(self, isolated: ColumnElement[Any]) -> list[ColumnElement[Any]]:
        """What is told of leased rows."""
        columns = self._messages.c
        told: dict[str, ColumnElement[Any]] = self._dialect.readable_columns(self._messages) | {
            "due_at": self._dialect.readable(columns.due_at, EARLIEST),
            "expired": columns.expires_at <= self._dialect.now(),
            "isolated": isolated,
        }
        return [told[name].label(name) for name in CLAIMED]


def due_parameters(selection: Selection) -> dict[str, Any]:
    """What `due` binds."""
    return {
        "wanted": selection.destination or NOT_ROUTED,
        "limit": selection.limit,
        "suspected": selection.suspected is not Suspected.NONE,
        "since": selection.since,
    }


def lease_parameters(selection: Selection, tokens: Tokens) -> dict[str, Any]:
    """What a leasing statement binds."""
    return {
        "token": tokens.token,
        "apart": tokens.apart,
        "lease": as_seconds(selection.lease),
        "isolated_at": NEVER if selection.isolated_at is None else selection.isolated_at,
    }
