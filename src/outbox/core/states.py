"""State: where a stored message is, and the words of the release before."""

from __future__ import annotations

from enum import StrEnum

from outbox.core.backlog import StoredMessage
from outbox.core.roles import Inspection


class State(StrEnum):
    """Where a stored message can be; dead letters are listed by themselves."""

    WAITING = "waiting"  # emitted, and not yet sent or routed
    UNROUTABLE = "unroutable"  # no queue is bound to its routing key
    QUEUED = "queued"  # in a queue, and not attempted yet
    RETRYING = "retrying"  # attempted, and waiting for the next attempt
    SENT = "sent"  # a relay sent it to its destination, and it is kept
    HANDLED = "handled"  # a listener handled it, and it is kept


DELIVERED = "delivered"  # what 0.1 called those that are queued
RENAMED = "the state 'delivered' is called 'queued': the old word is accepted in this release only"
DIVIDED = "the state 'sent' includes handled messages in this release only: they are in the state 'handled'"


async def in_state(
    inspection: Inspection, state: str | None, *, queue: str | None, limit: int, after: int
) -> tuple[list[StoredMessage], str | None]:
    """Messages in a state, which may have the name of 0.1, and what is deprecated about that name, if anything."""
    if state == DELIVERED:
        return await inspection.list_messages(state=State.QUEUED, queue=queue, limit=limit, after=after), RENAMED
    found = await inspection.list_messages(state=state, queue=queue, limit=limit, after=after)
    if state != State.SENT:
        return found, None
    handled = await inspection.list_messages(state=State.HANDLED, queue=queue, limit=limit, after=after)
    both = sorted((*found, *handled), key=lambda stored: stored.row_id)
    return both[:limit], DIVIDED if handled else None
