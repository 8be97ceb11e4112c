"""PgoutputDecoder: frames of a replication stream (pgoutput, protocol version 1) as values. No input or output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from struct import Struct, error
from typing import NamedTuple

from outbox.core.errors import LogUnreadable

# What stands in the stream itself.


class Keepalive(NamedTuple):
    """The server has sent everything up to this position."""

    position: int
    sent_at: int  # microseconds since 2000, by the server's clock
    reply: bool  # it wants to be answered at once


class LogData(NamedTuple):
    """A message of the plugin."""

    sent_at: int
    data: bytes


_KEEPALIVE = Struct("!QqB")
_LOG_DATA = Struct("!QQq")
_STATUS = Struct("!cQQQqB")


def unframed(frame: bytes) -> Keepalive | LogData:
    """What one frame of the stream holds."""
    kind = frame[:1]
    try:
        if kind == b"w":
            _, _, sent_at = _LOG_DATA.unpack_from(frame, 1)
            return LogData(sent_at, frame[25:])
        if kind == b"k":
            position, sent_at, reply = _KEEPALIVE.unpack_from(frame, 1)
            return Keepalive(position, sent_at, bool(reply))
    except error as cause:
        raise LogUnreadable(f"a frame of the replication stream ends too soon: {frame[:40]!r}") from cause
    raise LogUnreadable(f"no frame of a replication stream begins with {kind!r}")


def status(received: int, flushed: int, now: int, *, reply: bool = False) -> bytes:
    """What a client tells the server: the slot may forget everything before `flushed`."""
    return _STATUS.pack(b"r", received, flushed, flushed, now, reply)


# What the plugin says.


class Begin(NamedTuple):
    """A committed transaction begins."""

    final_position: int  # of its commit
    committed_at: int  # microseconds since 2000, by the server's clock
    xid: int


class Commit(NamedTuple):
    """It ends."""

    end: int  # the position behind it


class Column(NamedTuple):
    """A column of a relation, as it is sent from now on."""

    name: str
    type_oid: int


@dataclass(frozen=True, slots=True)
class RelationMessage:
    """How the rows of a table are sent from now on."""

    oid: int
    namespace: str
    name: str
    columns: tuple[Column, ...]


class Binary(bytes):
    """A value as the type's send function writes it; plain bytes are the type's text."""

    __slots__ = ()


class _Unchanged:
    """A value that was not sent because it did not change. An inserted row has none."""

    def __len__(self) -> int:
        return 0


UNCHANGED = _Unchanged()

Value = bytes | Binary | None | _Unchanged
Values = Mapping[str, Value]


class Insert(NamedTuple):
    """A row was inserted."""

    relation: RelationMessage
    values: Values  # by column


class Other(NamedTuple):
    """What needs nothing to be done: an origin, a type, a message, a change that is no insert."""

    kind: str


Decoded = Begin | Commit | RelationMessage | Insert | Other

_BEGIN = Struct("!QqI")
_COMMIT = Struct("!BQQq")
_RELATION = Struct("!I")
_COUNT = Struct("!H")
_COLUMN = Struct("!II")
_LENGTH = Struct("!I")
_OTHERS = {b"O": "origin", b"Y": "type", b"M": "message", b"U": "update", b"D": "delete", b"T": "truncate"}


class PgoutputDecoder:
    """Knows the relations that the server has told of in this connection."""

    def __init__(self) -> None:
        self._relations: dict[int, RelationMessage] = {}
        self._names: dict[int, tuple[str, ...]] = {}  # of their columns
        self._decode: dict[bytes, Callable[[bytes], Decoded]] = {
            b"B": self._begin,
            b"C": self._commit,
            b"I": self._insert,
            b"R": self._relation,
        }

    def decode(self, data: bytes) -> Decoded:
        """One message of the plugin; raises LogUnreadable."""
        kind = data[:1]
        decode = self._decode.get(kind)
        if decode is None:
            if kind in _OTHERS:
                return Other(_OTHERS[kind])
            raise LogUnreadable(f"pgoutput's version 1 has no message {kind!r}")
        try:
            return decode(data)
        except (error, IndexError, UnicodeDecodeError, ValueError) as cause:
            raise LogUnreadable(f"a message {kind.decode()!r} of pgoutput cannot be read: {cause}") from cause

    def _begin(self, data: bytes) -> Begin:
        return Begin(*_BEGIN.unpack_from(data, 1))

    def _commit(self, data: bytes) -> Commit:
        _, _, end, _ = _COMMIT.unpack_from(data, 1)
        return Commit(end)

    def _relation(self, data: bytes) -> RelationMessage:
        (oid,) = _RELATION.unpack_from(data, 1)
        namespace, at = _name(data, 5)
        name, at = _name(data, at)
        (count,) = _COUNT.unpack_from(data, at + 1)  # behind the replica identity
        at += 3
        columns = []
        for _ in range(count):
            column, at = _name(data, at + 1)  # behind its flags
            type_oid, _ = _COLUMN.unpack_from(data, at)
            at += 8
            columns.append(Column(column, type_oid))
        relation = self._relations[oid] = RelationMessage(oid, namespace or "pg_catalog", name, tuple(columns))
        self._names[oid] = tuple(column.name for column in columns)
        return relation

    def _insert(self, data: bytes) -> Insert:
        (oid,) = _RELATION.unpack_from(data, 1)
        relation = self._relations.get(oid)
        if relation is None:
            raise ValueError(f"it is of relation {oid}, of which the server did not tell")
        if data[5:6] != b"N":
            raise ValueError(f"it has {data[5:6]!r} in place of a new row")
        (count,) = _COUNT.unpack_from(data, 6)
        if count != len(relation.columns):
            raise ValueError(f"it has {count} columns, and {relation.name} has {len(relation.columns)}")
        values = dict(zip(self._names[oid], _values(data, 8, count), strict=True))
        return Insert(relation, values)


def _values(data: bytes, at: int, count: int) -> list[Value]:
    # Each row passes here, with all of its columns: a list is made in half the time that a generator takes.
    values: list[Value] = []
    for _ in range(count):
        kind = data[at]
        at += 1
        if kind == 0x6E:  # n
            values.append(None)
        elif kind == 0x62 or kind == 0x74:  # b, t
            (length,) = _LENGTH.unpack_from(data, at)
            at += 4
            value = data[at : at + length]
            if len(value) != length:
                raise ValueError(f"a value of {length} bytes has only {len(value)}")
            at += length
            values.append(Binary(value) if kind == 0x62 else value)
        elif kind == 0x75:  # u
            values.append(UNCHANGED)
        else:
            raise ValueError(f"no value is of kind {chr(kind)!r}")
    return values


def _name(data: bytes, at: int) -> tuple[str, int]:
    """A name that ends with a zero, and where the next value begins."""
    end = data.index(b"\0", at)
    return data[at:end].decode(), end + 1
