"""Extend: what a store, a transport or a tool of your own is written with."""

from outbox.core.attempt import Attempt, Dead, Done, Outcome, Reason, Released, RetryIn
from outbox.core.backlog import Backlog, QueueBacklog
from outbox.core.binding import Binding, Bindings, matches
from outbox.core.dead_letter import FIRST_OF_QUEUES, DeadLetter, DeadLetters, Deaths, Filter, clean
from outbox.core.diagnosis import Examination, Finding, Level
from outbox.core.listener import Listener
from outbox.core.loops import LoopLocal
from outbox.core.message import Message, Schedule
from outbox.core.retry import RetryPolicy
from outbox.core.roles import (
    CallerTransactions,
    CircuitTable,
    Difference,
    InboxTable,
    Inspection,
    Maintenance,
    OwnersTable,
    Queues,
    Setback,
    Writing,
)
from outbox.core.settlement import Settlement
from outbox.core.store import Store, StoreClass
from outbox.core.transport import (
    Consumer,
    Defaults,
    Delivery,
    Features,
    Offer,
    Provisioning,
    Published,
    Refusal,
    Report,
    Takers,
    Transport,
    unreported,
)
from outbox.stores.callers import CallerConnections
from outbox.stores.ddl import creation
from outbox.stores.dialect import SqlDialect
from outbox.stores.returning import ReturningChange, ReturningInbox, ReturningSelecting, ReturningSettling
from outbox.stores.runner import Runner
from outbox.stores.selecting import SqlSelecting
from outbox.stores.sql import SqlStore
from outbox.stores.wakeup import Wakeup

__all__ = [
    "FIRST_OF_QUEUES",
    "Attempt",
    "Backlog",
    "Binding",
    "Bindings",
    "CallerConnections",
    "CallerTransactions",
    "CircuitTable",
    "Consumer",
    "Dead",
    "DeadLetter",
    "DeadLetters",
    "Deaths",
    "Defaults",
    "Delivery",
    "Difference",
    "Done",
    "Examination",
    "Features",
    "Filter",
    "Finding",
    "InboxTable",
    "Inspection",
    "Level",
    "Listener",
    "LoopLocal",
    "Maintenance",
    "Message",
    "Offer",
    "Outcome",
    "OwnersTable",
    "Provisioning",
    "Published",
    "QueueBacklog",
    "Queues",
    "Reason",
    "Refusal",
    "Released",
    "Report",
    "RetryIn",
    "RetryPolicy",
    "ReturningChange",
    "ReturningInbox",
    "ReturningSelecting",
    "ReturningSettling",
    "Runner",
    "Schedule",
    "Setback",
    "Settlement",
    "SqlDialect",
    "SqlSelecting",
    "SqlStore",
    "Store",
    "StoreClass",
    "Takers",
    "Transport",
    "Wakeup",
    "Writing",
    "clean",
    "creation",
    "matches",
    "unreported",
]
