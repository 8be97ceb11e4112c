"""The transactional outbox and inbox: a message is delivered if, and only if, your transaction commits."""

from typing import Any

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
    ForkRefused,
    HeaderInvalid,
    HeadersTooLarge,
    KeyInvalid,
    LeaseLost,
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
    "ForkRefused",
    "HeaderInvalid",
    "HeadersTooLarge",
    "KeyInvalid",
    "LeaseLost",
    "Listener",
    "Message",
    "MessageError",
    "MessageIdInvalid",
    "NotAtomicWarning",
    "NotFound",
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
    "transactional",
    "worker",
]


def __getattr__(name: str) -> Any:
    """What depends on setup() is looked up when it is asked for."""
    if name in ("metadata", "dead_letters"):
        return getattr(outbox, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
