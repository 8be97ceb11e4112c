"""A program that forks after it has used an outbox: `python -m tests.walk.forking case url table`. It prints JSON."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from multiprocessing.queues import Queue
from typing import Any

from sqlalchemy import create_engine, event, text
from sqlalchemy.orm import Session

from outbox import ConfigurationError, Outbox
from outbox.inbound import transaction_guard
from outbox.stores.postgresql import PostgresqlStore

CHILDREN, EACH, WITHIN = 3, 15, 30.0
THREADS, ROUNDS, CHILD_WITHIN = 2, 3, 10.0
forks = multiprocessing.get_context("fork")


class Undone(Exception):
    """A transaction that rolls back."""


class Shop:
    """Orders: a row and a message each. Every third one is rolled back."""

    def __init__(self, url: str, table: str) -> None:
        self.outbox = Outbox(db_engine_url=url, table_name=table)
        self.orders = f"{table}_orders"
        self.store_plain = self.outbox.transactional(self._store_plain)

    async def prepare(self) -> None:
        async with self.outbox.transaction() as session:
            await session.execute(text(f"CREATE TABLE {self.orders} (name text)"))
            await self.outbox.emit(session, "shop.opened", None)

    def both(self, process: int, numbers: range) -> list[str]:
        """Store orders without and with an event loop; the names of those of which we were told that they are."""
        return [*self.plain(process, numbers), *asyncio.run(self.waiting(process, numbers))]

    def plain(self, process: int, numbers: range) -> list[str]:
        stored = []
        for number in numbers:
            try:
                stored.append(self.store_plain(f"plain {process} {number}", number % 3 == 2))
            except Undone:
                continue
        return stored

    def _store_plain(self, name: str, fails: bool, session: Session) -> str:
        session.execute(text(f"INSERT INTO {self.orders} VALUES (:name)"), {"name": name})
        self.outbox.emit_sync(session, "order.created", name)
        if fails:
            raise Undone
        return name

    async def waiting(self, process: int, numbers: range) -> list[str]:
        stored = []
        for number in numbers:
            name = f"waiting {process} {number}"
            try:
                async with self.outbox.transaction() as session:
                    await session.execute(text(f"INSERT INTO {self.orders} VALUES (:name)"), {"name": name})
                    await self.outbox.emit(session, "order.created", name)
                    if number % 3 == 2:
                        raise Undone
                stored.append(name)
            except Undone:
                continue
        return stored

    async def found(self) -> dict[str, list[str]]:
        async with self.outbox.transaction() as session:
            rows = await session.scalars(text(f"SELECT name FROM {self.orders}"))
            orders = sorted(rows)
        messages = [json.loads(each.message.body) for each in await self.outbox.messages(limit=100_000)]
        await self.outbox.close()
        return {"orders": orders, "messages": sorted(name for name in messages if name)}


def in_child(work: Callable[[], Any]) -> Any:
    """What work gives in a forked child, or the name of what it raises."""
    answers: Queue[Any] = forks.Queue()
    child = forks.Process(target=lambda: answers.put(tried(work)))
    child.start()
    try:
        return answers.get(timeout=WITHIN)
    finally:
        child.join(WITHIN)


def tried(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except ConfigurationError as error:
        return type(error).__name__


def many(shop: Shop) -> dict[str, Any]:
    """Parent and children store orders at the same time, on what they have of each other."""
    asyncio.run(shop.prepare())
    told = shop.both(0, range(1))
    answers: Queue[list[str]] = forks.Queue()
    children = [
        forks.Process(target=lambda n=n: answers.put(shop.both(n, range(EACH)))) for n in range(1, CHILDREN + 1)
    ]
    for child in children:
        child.start()
    told += shop.both(0, range(1, EACH))
    for _ in children:
        told += answers.get(timeout=WITHIN)
    for child in children:
        child.join(WITHIN)
    return {"told": sorted(told), **asyncio.run(shop.found())}


def inside(shop: Shop) -> dict[str, Any]:
    """A process forks in the middle of a transaction, and the child leaves it by an exception."""
    asyncio.run(shop.prepare())
    with shop.outbox.transaction_sync() as session:
        shop.store_plain(name="inside", fails=False, session=session)
        child = os.fork()
        if not child:
            try:
                session.rollback()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    return {"told": ["inside"], **asyncio.run(shop.found())}


def refused(shop: Shop) -> dict[str, Any]:
    """SQLite: children while the parent has the file open, one when it has closed it, one of a database in memory."""
    asyncio.run(shop.prepare())
    told = shop.both(0, range(1))  # the plain one keeps its connection
    answers = [in_child(lambda: shop.plain(1, range(1))), in_child(lambda: asyncio.run(shop.waiting(1, range(1))))]
    told += shop.plain(0, range(1, 2))
    asyncio.run(shop.outbox.close())
    told += in_child(lambda: shop.both(2, range(1)))
    memory = Shop("sqlite+aiosqlite:///:memory:", "orders")
    asyncio.run(memory.prepare())
    answers.append(in_child(lambda: asyncio.run(memory.waiting(1, range(1)))))
    return {"answers": answers, "told": sorted(told), **asyncio.run(shop.found())}


def threads(shop: Shop) -> dict[str, Any]:
    """A process forks again and again while threads of it store orders; the children do too."""
    asyncio.run(shop.prepare())
    told, over, codes = shop.plain(0, range(1)), threading.Event(), []

    def busy(thread: int) -> None:
        for number in count():
            if over.is_set():
                return
            told.extend(shop.plain(thread, range(number, number + 1)))

    working = [threading.Thread(target=busy, args=[-1 - thread]) for thread in range(THREADS)]
    for each in working:
        each.start()
    for first in range(1, ROUNDS * CHILDREN, CHILDREN):
        children = range(first, first + CHILDREN)
        codes += ended([started(partial(shop.both, n, range(3))) for n in children])
        told += [f"{kind} {n} {number}" for kind in ("plain", "waiting") for n in children for number in range(2)]
    over.set()
    for each in working:
        each.join(WITHIN)
    return {"codes": codes, "told": sorted(told), **asyncio.run(shop.found())}


def midway(shop: Shop) -> dict[str, Any]:
    """A process forks while a thread of it stands where another one, or a child, may have to pass."""
    asyncio.run(shop.prepare())
    codes: dict[str, list[int | None]] = {}
    dialect = create_engine("sqlite://").dialect
    for owner, name, work in [
        (PostgresqlStore, "make_sync_engine", lambda n: shop.plain(n, range(1))),  # where an engine is made
        (Session, "connection", lambda n: shop.plain(n, range(1))),  # where a pool may have none
        (event, "listen", lambda _: transaction_guard._watch(dialect)),  # at the first message of a plain listener
    ]:
        n = 2 * len(codes)
        with standing_in(owner, name, partial(work, n)):
            codes[name] = ended([started(partial(work, n + 1))])
    return {"codes": codes, "told": sorted(f"plain {n} 0" for n in range(4)), **asyncio.run(shop.found())}


@contextmanager
def standing_in(owner: Any, name: str, work: Callable[[], Any]) -> Iterator[None]:
    """While the block lasts, a thread at work does not get past the beginning of a function."""
    function, inside, over = getattr(owner, name), threading.Event(), threading.Event()

    def stopping(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is thread:
            inside.set()
            over.wait(WITHIN)
        return function(*arguments, **options)

    thread = threading.Thread(target=work)
    setattr(owner, name, stopping)
    try:
        thread.start()
        if not inside.wait(WITHIN):
            raise TimeoutError(f"the thread does not come to {name}")
        yield
    finally:
        over.set()
        thread.join(WITHIN)
        setattr(owner, name, function)


def started(work: Callable[[], Any]) -> Any:
    child = forks.Process(target=work)
    child.start()
    return child


def ended(children: list[Any]) -> list[int | None]:
    """How they ended. One that hangs is killed."""
    for child in children:
        child.join(CHILD_WITHIN)
        if child.is_alive():
            child.kill()
            child.join(WITHIN)
    return [child.exitcode for child in children]


if __name__ == "__main__":
    case, url, table = sys.argv[1:]
    print(json.dumps(globals()[case](Shop(url, table))))
