"""Order: whether messages first went out in the order in which they were committed.

The order of commits is the log's own, as the rig's slot told it; within a transaction it is that of its inserts. First
deliveries are those to a queue of the rig's, which gets a copy of everything that the broker took from relays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.evidence import FinalTables
from tests.chaos.history import History


@dataclass(frozen=True)
class Ordering:
    """What was compared, and what came after something that was committed later."""

    compared: int
    left: int  # messages that the log left to the table, which have no place in its order
    overtaken: Sequence[tuple[str, str]]  # a message, and the one that was delivered before it


def ordering(history: History, tables: FinalTables) -> Ordering:
    """Compare first deliveries with commits. A row that was changed before it was deleted was left to the table."""
    places = _places(history, tables)
    left = {change.message_id for change in tables.changes if not change.deleted}
    delivered = [id for id in dict.fromkeys(tables.delivered) if id in places and id not in left]
    overtaken, furthest = [], ""
    for id in delivered:
        if furthest and places[id] < places[furthest]:
            overtaken.append((id, furthest))
        else:
            furthest = id
    return Ordering(len(delivered), len(left & places.keys()), overtaken)


def _places(history: History, tables: FinalTables) -> dict[str, tuple[int, int]]:
    """By message, when it was committed: the place of its transaction, and its own place in that."""
    commits = {number: place for place, number in enumerate(tables.commits)}
    return {
        message.id: (commits[transaction.number], place)
        for transaction in history.transactions
        if transaction.number in commits
        for place, message in enumerate(transaction.messages)
    }
