"""The decoder of the replication stream: what it reads, and that it raises one error for everything else."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outbox.core.errors import LogUnreadable
from outbox.stores.postgresql.wal.buffer import LogBuffer, LoggedMessage
from outbox.stores.postgresql.wal.connection import as_lsn, as_position
from outbox.stores.postgresql.wal.inserted_row import InsertedRow
from outbox.stores.postgresql.wal.pgoutput import (
    Begin,
    Binary,
    Column,
    Commit,
    Insert,
    Keepalive,
    LogData,
    Other,
    PgoutputDecoder,
    RelationMessage,
    status,
    unframed,
)
from outbox.stores.postgresql.wal.table import SeenTransactions
from outbox.stores.postgresql.wal.window import LogWindow

BEGIN = b"B" + struct.pack("!QqI", 100, 7, 42)
COMMIT = b"C" + struct.pack("!BQQq", 0, 100, 120, 7)
RELATION = b"R" + struct.pack("!I", 5) + b"public\0t\0d" + struct.pack("!H", 2)
RELATION += b"\x01id\0" + struct.pack("!II", 20, 0) + b"\0body\0" + struct.pack("!II", 17, 0)
INSERT = b"I" + struct.pack("!I", 5) + b"N" + struct.pack("!H", 2)
INSERT += b"b" + struct.pack("!Iq", 8, 9) + b"t" + struct.pack("!I", 4) + b"\\x41"


def test_a_transaction_is_decoded() -> None:
    decoder = PgoutputDecoder()
    relation = RelationMessage(5, "public", "t", (Column("id", 20), Column("body", 17)))
    assert [decoder.decode(each) for each in (BEGIN, RELATION, INSERT, COMMIT)] == [
        Begin(100, 7, 42),
        relation,
        Insert(relation, {"id": struct.pack("!q", 9), "body": b"\\x41"}),
        Commit(120),
    ]


def test_a_row_of_a_table_that_was_not_told_is_unreadable() -> None:
    with pytest.raises(LogUnreadable, match="relation 5"):
        PgoutputDecoder().decode(INSERT)


@pytest.mark.parametrize("kind", "OYMUDT")
def test_what_is_no_insert_is_passed_by(kind: str) -> None:
    assert isinstance(PgoutputDecoder().decode(kind.encode() + b"anything"), Other)


@given(st.binary(max_size=200))
@example(b"")
@example(b"S")
def test_no_bytes_raise_another_error(data: bytes) -> None:
    decoder = PgoutputDecoder()
    decoder.decode(RELATION)
    for decode in (decoder.decode, unframed):
        for each in (data, b"R" + data, b"I\0\0\0\x05N" + data, b"w" + data):
            with contextlib.suppress(LogUnreadable):
                decode(each)


@given(st.sampled_from([BEGIN, COMMIT, RELATION, INSERT]), st.integers(1, 200))
def test_what_is_cut_off_is_unreadable(data: bytes, length: int) -> None:
    decoder = PgoutputDecoder()
    decoder.decode(RELATION)
    if length < len(data):
        with pytest.raises(LogUnreadable):
            decoder.decode(data[:length])


@given(st.dictionaries(st.sampled_from(["id", "body", "due_at", "headers", "x"]), st.binary(max_size=20).map(Binary)))
def test_a_row_of_anything_is_dead_or_unreadable(values: dict[str, bytes]) -> None:
    """Another program may have written it; without an id nothing can be said of it."""
    try:
        row = InsertedRow.of(Insert(RelationMessage(5, "public", "t", ()), values))
    except LogUnreadable:
        assert "id" not in values
    else:
        assert row.dead is not None


def test_frames_of_the_stream() -> None:
    assert unframed(b"k" + struct.pack("!QqB", 5, 6, 1)) == Keepalive(5, 6, True)
    assert unframed(b"w" + struct.pack("!QQq", 1, 2, 3) + b"data") == LogData(3, b"data")
    assert status(9, 8, 7, reply=True) == b"r" + struct.pack("!QQQqB", 9, 8, 8, 7, 1)


@given(st.integers(0, 2**64 - 1))
def test_a_position_is_written_as_the_server_writes_it(position: int) -> None:
    assert as_position(as_lsn(position)) == position
    assert as_lsn(0x16B374D848) == "16/B374D848"


def row(id: int = 1) -> InsertedRow:
    return InsertedRow(id, 0, None, True, 10, None, None)


def test_a_position_is_confirmed_when_everything_before_is_settled() -> None:
    buffer = LogBuffer(lambda: None)
    window = buffer.window
    messages: list[LoggedMessage] = []
    for end in (10, 20, 30):
        transaction = window.begin(end, 0)
        for _ in range(2):
            messages.append(LoggedMessage(row(len(messages)), transaction, window, doubtful=False))
            buffer.add(messages[-1])
        window.sent_up_to(end + 5)
        assert window.confirmed == 0
        window.commit(transaction, end)
    for settled, confirmed in ((2, 0), (3, 0), (0, 0), (0, 0), (1, 20), (5, 20), (4, 30)):
        buffer.settle(messages[settled])
        assert window.confirmed == confirmed
    window.sent_up_to(50)
    assert window.confirmed == 50


def test_a_transaction_without_an_end_confirms_nothing() -> None:
    window = LogWindow()
    transaction = window.begin(1, 0)
    transaction.unsettled = 1
    window.settled(transaction)
    window.sent_up_to(99)
    assert window.confirmed == 0
    window.commit(transaction, 7)
    assert window.confirmed == 7


def test_what_is_given_back_goes_first_and_not_into_another_connections_buffer() -> None:
    buffer = LogBuffer(lambda: None)
    transaction = buffer.window.begin(1, 0)
    messages = [LoggedMessage(row(id), transaction, buffer.window, doubtful=False) for id in range(4)]
    for message in messages:
        buffer.add(message)
    taken = buffer.take(2, 1000)
    buffer.give_back(taken)
    assert buffer.take(4, 1000) == messages
    buffer.renew()
    buffer.give_back(messages)
    assert buffer.is_empty


def test_no_id_is_in_a_batch_twice() -> None:
    buffer = LogBuffer(lambda: None)
    transaction = buffer.window.begin(1, 0)
    for id in (1, 2, 1):
        buffer.add(LoggedMessage(row(id), transaction, buffer.window, doubtful=False))
    assert [message.row.id for message in buffer.take(9, 1000)] == [1, 2]


@pytest.mark.parametrize(
    ("snapshot", "xid", "seen"),
    [
        ("10:20:10,15", 9, True),
        ("10:20:10,15", 10, False),
        ("10:20:10,15", 12, True),
        ("10:20:10,15", 20, False),
        ("10:20:", 25, False),
        (f"{2**32 + 3}:{2**32 + 5}:", 4, True),
        (f"{2**32 + 3}:{2**32 + 5}:", 5, False),
        (f"{2**32 + 3}:{2**32 + 5}:", 2**32 - 1, True),
    ],
)
def test_a_snapshot_tells_which_transactions_it_sees(snapshot: str, xid: int, seen: bool) -> None:
    assert SeenTransactions.of(snapshot).has(xid) is seen
