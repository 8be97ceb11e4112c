"""Services: orders and shipping, which answer each other's messages and keep the same balances.

A producer of orders adds amounts to an account in the transaction that emits them. Shipping adds them to its own when
it handles them, and replies. Orders counts the replies. In the end all three balances of an account are equal.
Listeners take lists or single messages, from the broker or from their database; each service has two of these ways.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from operator import itemgetter
from typing import Any
from uuid import uuid4

from sqlalchemy import Insert, insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import Message, Reject, emit, emit_sync, listen
from tests.chaos import mistakes
from tests.chaos.fates import FATES, Fate
from tests.chaos.history import Emitted
from tests.chaos.listeners import UNLUCKY, Order, PlannedFailure, again, begin, effect, end, everywhere, kill_once
from tests.chaos.surroundings import Surroundings, historian
from tests.chaos.tables import CONFIRMED, SHIPPED, added, orders

MOST_IN_A_LIST = 20

Failures = dict[int, Exception]


@listen("order.*", queue="invoices", retry_delays=again, max_crashes=UNLUCKY, batch=MOST_IN_A_LIST)
async def invoices(
    bodies: list[Order], messages: list[Message], queue_name: str, attempt_count: int, session: AsyncSession
) -> Failures:
    """Lists from the broker."""
    return await handle(bodies, messages, queue_name, attempt_count, session, SHIPPED, reply_key="reply.shipped")


@listen("order.shared", queue="ledger", retry_delays=again, max_crashes=UNLUCKY, store_first=True, concurrency=4)
def ledger(body: Order, message: Message, queue_name: str, attempt_count: int, session: Session) -> None:
    """One message in a thread, from the database."""
    fate = begin(body, message, queue_name, attempt_count)
    session.execute(effect(message, queue_name, attempt_count))
    reply = emit_sync(session, "reply.booked", answer(body))
    session.execute(told(reply, fate))
    if fate.name == "slow":
        time.sleep(Surroundings.here().slow)
    session.execute(added(SHIPPED, body["account"], body["amount"]))
    mistakes.make_plainly(fate, session, message, attempt_count)
    end(fate, message, queue_name, attempt_count)


@listen(
    "reply.shipped",
    queue="confirmations",
    retry_delays=again,
    max_crashes=UNLUCKY,
    store_first=True,
    batch=MOST_IN_A_LIST,
)
async def confirmations(
    bodies: list[Order], messages: list[Message], queue_name: str, attempt_count: int, session: AsyncSession
) -> Failures:
    """Lists from the database."""
    return await handle(bodies, messages, queue_name, attempt_count, session, CONFIRMED)


@listen("reply.booked", queue="bookings", retry_delays=again, max_crashes=UNLUCKY)
async def bookings(body: Order, message: Message, queue_name: str, attempt_count: int, session: AsyncSession) -> None:
    """One message, from the broker."""
    fate = begin(body, message, queue_name, attempt_count)
    await session.execute(effect(message, queue_name, attempt_count))
    if fate.name == "slow":
        await asyncio.sleep(Surroundings.here().slow)
    await session.execute(added(CONFIRMED, body["account"], body["amount"]))
    await mistakes.make(fate, session, message, attempt_count)
    end(fate, message, queue_name, attempt_count)


shipping = [invoices, ledger, *everywhere]
ordering = [confirmations, bookings]


async def handle(
    bodies: list[Order],
    messages: list[Message],
    queue: str,
    attempt: int,
    session: AsyncSession,
    book: str,
    reply_key: str = "",
) -> Failures:
    """Each message in a savepoint, so that one that fails takes nothing with it but its own."""
    failures: Failures = {}
    for position, (body, message) in enumerate(zip(bodies, messages, strict=True)):
        fate = begin(body, message, queue, attempt)
        if fate.name == "kills once":
            kill_once(message)
        try:
            async with session.begin_nested():
                await session.execute(effect(message, queue, attempt))
                if reply_key:
                    reply = await emit(session, reply_key, answer(body))
                    await session.execute(told(reply, fate))
                if fate.name == "slow":
                    await asyncio.sleep(Surroundings.here().slow)
                end(fate, message, queue, attempt)
        except (PlannedFailure, Reject) as error:
            failures[position] = error
    handled = [body for position, body in enumerate(bodies) if position not in failures]
    for body in sorted(handled, key=itemgetter("account")):  # in one order, so that no two lists wait for each other
        await session.execute(added(book, body["account"], body["amount"]))
    for body, message in zip(bodies, messages, strict=True):  # outside of savepoints, so it concerns all of them
        await mistakes.make(FATES[body["fate"]], session, message, attempt)
    return failures


def answer(body: Order) -> Mapping[str, Any]:
    """A reply is about the same amount, and shares the fate of what it answers."""
    return {name: body[name] for name in ("fate", "account", "amount")}


def told(reply: Message | None, fate: Fate) -> Insert:
    """Say what is about to be emitted; the row, in the same transaction, then tells whether it was."""
    assert reply is not None
    number = f"reply {uuid4().hex}"
    historian().note("replies", number=number, message=Emitted.of(reply, fate.name).as_facts())
    return insert(orders).values(number=number, messages=1)
