"""The transactional outbox and inbox: a message is delivered if, and only if, your transaction commits."""

import typing

from outbox.core.attempt import Reason
from outbox.core.binding import Binding
from outbox.core.dead_letter import DeadLetter
from outbox.core.durations import IMMEDIATELY, NEVER
from outbox.core.errors import (
    BodyNotJson,
    BodyTooLarge,
    ClosedForGood,
    CloudEventInvalid,
    CloudEventUnsupported,
    ConfigurationError,
    DatabaseReplaced,
    DatabaseSilent,
    FeedMismatch,
    ForkRefused,
    HeaderInvalid,
    HeadersTooLarge,
    KeyInvalid,
    LeaseLost,
    LogUnreadable,
    MessageError,
    MessageIdInvalid,
    NotAtomicWarning,
    NotFound,
    OutboxError,
    Reject,
    RoutingKeyInvalid,
    SignatureInvalid,
    SnapshotConflict,
    TablesMissing,
    TimeInvalid,
    TimerIdInvalid,
    TooManyEvents,
    TooManyHeaders,
    TransactionError,
    TransportClosed,
    TransportMismatch,
    TransportUnavailable,
    Undecodable,
    UrlRefused,
    WrongDatabase,
    WrongEventLoop,
)
from outbox.core.listener import Listener, listen
from outbox.core.listener_options import FailedAttempt
from outbox.core.message import Message, get_tracking_ids, tracking
from outbox.core.retry import RetryPolicy
from outbox.core.store import Backlog, Difference, QueueBacklog, StoredMessage
from outbox.instance import Outbox
from outbox.options import Options

__version__ = "0.2.0"

outbox = Outbox()

setup = outbox.setup
emit = outbox.emit
emit_many = outbox.emit_many
emit_sync = outbox.emit_sync
emit_many_sync = outbox.emit_many_sync
cancel_timer = outbox.cancel_timer
cancel_timer_sync = outbox.cancel_timer_sync
receive = outbox.receive
receive_sync = outbox.receive_sync
transaction = outbox.transaction
transaction_sync = outbox.transaction_sync
transactional = outbox.transactional
after_commit = outbox.after_commit
message_relay = outbox.message_relay
worker = outbox.worker
running = outbox.running
http_app = outbox.http_app
backlog = outbox.backlog
create_tables = outbox.create_tables
check_tables = outbox.check_tables
close = outbox.close

__all__ = [
    "IMMEDIATELY",
    "NEVER",
    "Backlog",
    "Binding",
    "BodyNotJson",
    "BodyTooLarge",
    "ClosedForGood",
    "CloudEventInvalid",
    "CloudEventUnsupported",
    "ConfigurationError",
    "DatabaseReplaced",
    "DatabaseSilent",
    "DeadLetter",
    "Difference",
    "FailedAttempt",
    "FeedMismatch",
    "ForkRefused",
    "HeaderInvalid",
    "HeadersTooLarge",
    "KeyInvalid",
    "LeaseLost",
    "Listener",
    "LogUnreadable",
    "Message",
    "MessageError",
    "MessageIdInvalid",
    "NotAtomicWarning",
    "NotFound",
    "Options",
    "Outbox",
    "OutboxError",
    "QueueBacklog",
    "Reason",
    "Reject",
    "RetryPolicy",
    "RoutingKeyInvalid",
    "SignatureInvalid",
    "SnapshotConflict",
    "StoredMessage",
    "TablesMissing",
    "TimeInvalid",
    "TimerIdInvalid",
    "TooManyEvents",
    "TooManyHeaders",
    "TransactionError",
    "TransportClosed",
    "TransportMismatch",
    "TransportUnavailable",
    "Undecodable",
    "UrlRefused",
    "WrongDatabase",
    "WrongEventLoop",
    "after_commit",
    "backlog",
    "cancel_timer",
    "cancel_timer_sync",
    "check_tables",
    "close",
    "create_tables",
    "emit",
    "emit_many",
    "emit_many_sync",
    "emit_sync",
    "get_tracking_ids",
    "http_app",
    "listen",
    "message_relay",
    "outbox",
    "receive",
    "receive_sync",
    "running",
    "setup",
    "tracking",
    "transaction",
    "transaction_sync",
    "transactional",
    "worker",
]

if typing.TYPE_CHECKING:  # names of the module that depend on setup(); it has no others that are looked up
    from sqlalchemy import MetaData

    from outbox.core.dead_letter import DeadLetters

    metadata: MetaData
    dead_letters: DeadLetters
else:

    def __getattr__(name: str) -> typing.Any:
        """What depends on setup() is looked up when it is asked for."""
        if name in ("metadata", "dead_letters"):
            return getattr(outbox, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
