"""Errors: everything this library raises on purpose.

OutboxError
├── ConfigurationError          the setup cannot work; the text says what to change
│   ├── TransportMismatch       the table already belongs to another transport
│   ├── FeedMismatch            the table is read from the write-ahead log, or is not yet, and this relay does otherwise
│   ├── ForkRefused             SQLite: the parent of this process had the database open when it forked
│   ├── UrlRefused              a URL from a user leads where none may lead
│   └── WrongEventLoop          what was given is used by another event loop, and cannot be shared with it
├── MessageError (ValueError)   a message was refused before it was written
│   ├── RoutingKeyInvalid
│   ├── KeyInvalid
│   ├── BodyNotJson
│   ├── BodyTooLarge
│   ├── HeaderInvalid
│   ├── TooManyHeaders
│   ├── HeadersTooLarge
│   ├── TimeInvalid
│   ├── TimerIdInvalid
│   ├── MessageIdInvalid
│   └── CloudEventInvalid       a request from outside holds no CloudEvent
│       ├── CloudEventUnsupported   it may be one, in a format that is not read here
│       └── TooManyEvents       it holds more of them than are read at once
├── SignatureInvalid            no valid signature of this webhook with a known secret and a recent time
├── TransactionError            the caller's transaction cannot take the message
│   ├── SnapshotConflict        SQLite: it read before it wrote, and another transaction wrote meanwhile
│   ├── WrongDatabase           its session leads to another database than that of the outbox
│   └── TablesMissing           the tables do not exist yet, and the library may not make them here
├── Undecodable                 a body is not what its listener's annotation says: a dead letter
├── TransportUnavailable        nothing was sent: the destination is away
├── ClosedForGood               a relay or a worker cannot go on: it ends, and has to be started again
│   ├── TransportClosed         a connection that was given to the transport is closed
│   ├── LogUnreadable           the replication stream holds what this version cannot decode
│   └── DatabaseReplaced        SQLite: another file is where the database was
├── DatabaseSilent              the database did not answer in time
├── LeaseLost                   another worker holds this delivery now
└── NotFound                    no message or dead letter has that id

Reject                          raised by listeners: no retries, straight to the dead letters
NotAtomicWarning                an emit that no transaction protects
"""

from collections.abc import Iterator


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and what it was raised from: SQLAlchemy's, the driver's own."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def described(error: BaseException) -> str:
    """An error as its class and its text; the class alone where it has none."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def named(value: object) -> str:
    """A value in an error's text: short, and never an error itself."""
    text = repr(value) if isinstance(value, str | bytes | float | bool | None) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:60]}…"


class OutboxError(Exception):
    """The root of every error of this library."""


class ConfigurationError(OutboxError):
    """The setup cannot work as it was given."""


class TransportMismatch(ConfigurationError):
    """The outbox table was first used with another transport."""


class FeedMismatch(ConfigurationError):
    """A relay polls a table whose messages come from the write-ahead log, or the other way round."""


class UrlRefused(ConfigurationError):
    """A URL that came from a user is not one that this machine may send requests to."""


class ForkRefused(ConfigurationError):
    """A forked process may not use a SQLite database that its parent had open when it forked."""


class WrongEventLoop(ConfigurationError):
    """An engine or a transport that was given is used by another event loop, and cannot be used by two."""


class MessageError(OutboxError, ValueError):
    """A message was refused before anything was written."""


class RoutingKeyInvalid(MessageError):
    """The routing key is empty, too long, or contains what no broker carries."""


class KeyInvalid(MessageError):
    """The ordering key is empty, too long, or contains control characters."""


class BodyNotJson(MessageError):
    """The body cannot be written as strict JSON."""


class BodyTooLarge(MessageError):
    """The body is larger than `max_body_size`."""


class HeaderInvalid(MessageError):
    """A header's name or value cannot travel."""


class TooManyHeaders(MessageError):
    """There are more headers than a message may carry."""


class HeadersTooLarge(MessageError):
    """The headers together are larger than a message may carry."""


class TimeInvalid(MessageError):
    """An `eta` or `expiration` is not a time, or is outside of the range that can be stored."""


class TimerIdInvalid(MessageError):
    """The timer id is empty, too long, or contains control characters."""


class MessageIdInvalid(MessageError):
    """The id of a message from outside is empty, too long, or contains control characters."""


class CloudEventInvalid(MessageError):
    """A request from outside holds no CloudEvent 1.0, or a broken one."""


class CloudEventUnsupported(CloudEventInvalid):
    """A request from outside holds events in a format or charset that is not read here."""


class TooManyEvents(CloudEventInvalid):
    """A request from outside holds more events than are read at once."""


class SignatureInvalid(OutboxError):
    """A webhook was not signed with a secret that is known here, or not just now, or it was changed on its way."""


class TransactionError(OutboxError):
    """The caller's transaction cannot take the message."""


class SnapshotConflict(TransactionError):
    """SQLite cannot turn a transaction that has read into one that writes once another one has written."""


class WrongDatabase(TransactionError):
    """The session leads to another database than the one in which the outbox has its tables."""


class TablesMissing(TransactionError):
    """There are no tables, and none are made: on a driver's own connection, or because the role may not."""


class Undecodable(OutboxError):
    """The body is not what the listener's annotation says."""


class TransportUnavailable(OutboxError):
    """Nothing was sent: the destination does not answer. No message uses up an attempt."""


class ClosedForGood(OutboxError):
    """A relay or a worker cannot go on, and trying again does not help: it ends, and has to be started again."""


class LogUnreadable(ClosedForGood):
    """The replication stream holds a frame that this version cannot decode. Nothing was confirmed behind it."""


class DatabaseReplaced(ClosedForGood):
    """Another SQLite file, or none, is where the database was: what is written to the old one is lost."""


class TransportClosed(ClosedForGood):
    """A connection that was given to the transport is closed for good: relays and workers end with this."""


class DatabaseSilent(OutboxError):
    """The database did not answer in time. Whether it did what it was asked is unknown."""


class LeaseLost(OutboxError):
    """The lease expired: another worker has the delivery, or may claim it at any time."""


class NotFound(OutboxError):
    """Nothing has the id that was asked for."""


class Reject(Exception):
    """Raised by a listener: this message will never succeed, keep it as a dead letter without retries."""


class NotAtomicWarning(UserWarning):
    """A message was emitted where nothing ties it to the data it speaks of."""
