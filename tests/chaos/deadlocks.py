"""Deadlocks: the one error after which MariaDB has rolled a whole transaction back, and says so in passing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pymysql
from sqlalchemy import Column, Integer, MetaData, String, Table, TextClause, make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from tests.support.mariadb import arguments

DEADLOCK = 1213
HEAVY = 3000  # rows: the server ends the transaction that has written least

metadata = MetaData()
ballast = Table("ballast", metadata, Column("id", Integer, primary_key=True), Column("word", String(10)))
crossing = Table("crossing", metadata, Column("id", Integer, primary_key=True), Column("n", Integer))


class NoDeadlock(Exception):
    """There should have been one: the network or the server was in the way."""


class Opponent:
    """Another program's transaction, which has written so much that it always survives."""

    def __init__(self, url: str) -> None:
        self.connection = pymysql.connect(**arguments(url))
        self.cursor = self.connection.cursor()

    def __enter__(self) -> Opponent:
        self.cursor.execute(f"INSERT INTO ballast (word) SELECT 'x' FROM seq_1_to_{HEAVY}")
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(pymysql.Error):
            self.connection.rollback()
        with suppress(pymysql.Error):
            self.connection.close()

    def meet(self) -> tuple[int, int]:
        """Two rows that nobody else knows; the second one is locked."""
        rows = []
        for _ in range(2):
            self.cursor.execute("INSERT INTO crossing (n) VALUES (0)")
            rows.append(self.cursor.lastrowid)
        self.connection.commit()
        self.__enter__()
        self.touch(rows[1])
        return rows[0], rows[1]

    def touch(self, row: int) -> None:
        self.cursor.execute("UPDATE crossing SET n = n + 1 WHERE id = %s", [row])


@contextmanager
def _ends_in_a_deadlock() -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        if error.orig is None or error.orig.args[:1] != (DEADLOCK,):
            raise
    else:
        raise NoDeadlock


def _touch(row: int) -> TextClause:
    return text(f"UPDATE crossing SET n = n + 1 WHERE id = {row}")


def _url(session: Session) -> str:
    url: URL = make_url(session.get_bind().engine.url)
    return url.set(drivername="mysql").render_as_string(hide_password=False)


async def run_into(session: AsyncSession) -> None:
    """Let the session's transaction be rolled back by the server, and say nothing of it."""
    with await asyncio.to_thread(Opponent, _url(session.sync_session)) as opponent:
        first, second = await asyncio.to_thread(opponent.meet)
        await session.execute(_touch(first))
        waiting = asyncio.create_task(asyncio.to_thread(_wait, opponent, first))
        try:
            with _ends_in_a_deadlock():
                await session.execute(_touch(second))
        finally:
            await waiting


def run_into_plainly(session: Session) -> None:
    """The same with a plain session."""
    with Opponent(_url(session)) as opponent:
        first, second = opponent.meet()
        session.execute(_touch(first))
        waiting = threading.Thread(target=_wait, args=(opponent, first))
        waiting.start()
        try:
            with _ends_in_a_deadlock():
                session.execute(_touch(second))
        finally:
            waiting.join()


def _wait(opponent: Opponent, row: int) -> None:
    with suppress(pymysql.Error):
        opponent.touch(row)
