"""The rig's own slot tells what was committed, in that order; and the relays' slot may be dropped and made again."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine, insert

from tests.chaos.database import MEBIBYTE
from tests.chaos.log import LoggedDatabase
from tests.chaos.tables import orders

DISK = 64 * MEBIBYTE

pytestmark = pytest.mark.timeout(120)


def order(connection: Connection, *numbers: str) -> None:
    connection.execute(insert(orders), [{"number": number, "messages": 0} for number in numbers])


def test_commits_are_told_in_their_order_also_after_a_crash() -> None:
    with LoggedDatabase(DISK) as database:
        engine: Engine = create_engine(database.url, poolclass=NullPool)
        with engine.connect() as early, engine.connect() as late:
            order(early, "began first")
            order(late, "began second", "in the same transaction")
            late.commit()
            early.commit()
            order(late, "never")
            late.rollback()
        database.witness()
        database.crash()
        database.start()
        with engine.begin() as connection:
            order(connection, "after the crash")
        expected = ("began second", "in the same transaction", "began first", "after the crash")
        assert database.final_tables().commits == expected


def test_a_slot_that_was_dropped_can_be_made_again() -> None:
    with LoggedDatabase(DISK) as database:
        assert database.holder() == ""
        assert not database.end_stream(), "no relay reads"
        assert database.drop_slot()
        assert not database.drop_slot(), "there is none any more"
        database.make_slot()
        assert database.drop_slot()
