"""A standby has what a commit waited for, and the rig sees what it has not."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import NullPool, TextClause, create_engine, insert, select, text
from sqlalchemy.exc import OperationalError

from tests.chaos.database import MEBIBYTE
from tests.chaos.standby import LaggingPair, PostgresqlPair
from tests.chaos.tables import orders

DISK = 64 * MEBIBYTE
SOON = 60.0  # seconds
WAITS = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
LEVEL = text("SELECT count(*) FROM pg_stat_replication WHERE replay_lsn = pg_current_wal_lsn()")

pytestmark = pytest.mark.timeout(300)


def order(pair: PostgresqlPair, number: str) -> None:
    """As a process does, by way of the proxy."""
    engine = create_engine(pair.url.set(port=pair.link("producer-0").port), poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(insert(orders).values(number=number, messages=0))


def test_a_commit_that_the_standby_did_not_get_is_not_told_to_its_producer() -> None:
    with PostgresqlPair(DISK) as pair, ThreadPoolExecutor(1) as producer:
        order(pair, "early")
        pair.hold_back()
        late = producer.submit(order, pair, "late")
        until(lambda: counts(pair, WAITS))
        pair.fail_over()
        with pytest.raises(OperationalError):
            late.result()
        assert_what_the_standby_had_goes_on(pair)


def test_without_synchronous_replication_what_a_producer_was_told_vanishes_and_is_reported() -> None:
    with LaggingPair(DISK) as pair:
        order(pair, "early")
        until(lambda: counts(pair, LEVEL))
        pair.hold_back()
        order(pair, "late")
        pair.fail_over()
        assert_what_the_standby_had_goes_on(pair)


def assert_what_the_standby_had_goes_on(pair: PostgresqlPair) -> None:
    order(pair, "next")  # it has a standby of its own by now
    with pair.connection() as connection:
        assert set(connection.scalars(select(orders.c.number))) == {"early", "next"}
    (took,) = pair.final_tables().fail_overs
    assert took.vanished_orders == {"late"}


def counts(pair: PostgresqlPair, statement: TextClause) -> bool:
    with pair.connection() as connection:
        return bool(connection.scalar(statement))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
