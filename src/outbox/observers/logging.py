"""LoggingObserver: events as log records under the logger `outbox`. Bodies are never logged."""

from __future__ import annotations

import logging

from outbox.core.attempt import Dead, Done, Reason, Released, RetryIn
from outbox.core.durations import in_words
from outbox.core.events import (
    Advised,
    Bound,
    CircuitClosed,
    CircuitOpened,
    CleanedUp,
    Conflicted,
    Emitted,
    Event,
    Failed,
    Handled,
    HookFailed,
    LeaseWasLost,
    Received,
    Relayed,
    RequestDeclined,
    Routed,
    Started,
    StillRunning,
    Stopped,
    Troubled,
    Unroutable,
)
from outbox.core.printing import printable

logger = logging.getLogger("outbox")


def _escape_arguments(record: logging.LogRecord) -> bool:
    """Keep line breaks, marks of direction and the like out of a record: ids and keys may be a stranger's."""
    if isinstance(record.args, tuple):
        record.args = tuple(printable(each) if isinstance(each, str) else each for each in record.args)
    return True


logger.addFilter(_escape_arguments)


class LoggingObserver:
    """DEBUG: bindings, batches. INFO: work. WARNING: retries, dead letters, lost leases, advice. ERROR: failures."""

    def __call__(self, event: Event) -> None:
        match event:
            case Handled():
                self._handled(event)
            case Relayed():
                self._relayed(event)
            case Emitted(messages):
                if logger.isEnabledFor(logging.INFO):
                    for message in messages:
                        logger.info("emitted %s %s", message.routing_key, message.id)
            case Bound(binding):
                logger.debug("the queue %s is bound to %s", binding.queue, binding.binding_key)
            case Routed(queue, count):
                logger.debug("routed %d message(s) to %s", count, queue)
            case Unroutable(routing_key, count):
                logger.warning(
                    "no queue is bound to %s: %d message(s) wait; start a worker that listens, or see unroutable=",
                    routing_key,
                    count,
                )
            case Received(queue, stored, duplicates, unwanted, expired):
                if unwanted:
                    logger.warning("%d message(s) received for %s are dead: no listener has it", unwanted, queue)
                elif expired:
                    logger.warning("%d message(s) received for %s are dead: older than its inbox", expired, queue)
                else:
                    logger.debug("stored %d message(s) in %s, %d were there before", stored, queue, duplicates)
            case CircuitOpened(destination, error, pause):
                logger.error(
                    "%s takes nothing, the next attempt is in %s: %s",
                    _place(destination),
                    in_words(pause),
                    _first_line(error),
                )
            case CircuitClosed(destination):
                logger.info("%s answers again", _place(destination))
            case LeaseWasLost():
                self._lease_lost(event)
            case Conflicted(queue, attempt, run, error, pause):
                logger.info(
                    "run %d of %s %s from %s collided with another transaction, again in %s: %s",
                    run,
                    attempt.message.routing_key,
                    attempt.message.id,
                    queue,
                    in_words(pause),
                    _words(error),
                )
            case StillRunning(queue, attempt, duration):
                message = attempt.message
                logger.warning(
                    "%s %s from %s has been running for %s", message.routing_key, message.id, queue, in_words(duration)
                )
            case CleanedUp(what, count):
                logger.debug("cleaned up %d %s rows", count, what)
            case Started(what, detail):
                logger.info("%s started: %s", what, detail)
            case Stopped(what, abandoned):
                if abandoned:
                    logger.warning("%s stopped, %d listeners did not end in time and were abandoned", what, abandoned)
                else:
                    logger.info("%s stopped", what)
            case Failed(what, error):
                logger.error("%s ended by itself and is not started again: %s", what, _words(error))
            case HookFailed(what, error):
                logger.error("%s failed after the commit, which stands: %s", what, _words(error))
            case RequestDeclined(status, why):
                level = logging.WARNING if status >= 500 else logging.INFO
                logger.log(level, "declined a request with %d: %s", status, _first_line(why))
            case Advised(where, advice):
                logger.warning("%s: %s", where, _first_line(advice))
            case Troubled(where, error, pause):
                logger.error("%s: %s; again in %s", where, _words(error), in_words(pause))

    def _handled(self, event: Handled) -> None:
        message, queue = event.attempt.message, event.queue
        match event.outcome:
            case Done():
                if logger.isEnabledFor(logging.INFO):
                    logger.info(
                        "handled %s %s from %s in %s", message.routing_key, message.id, queue, in_words(event.duration)
                    )
            case RetryIn(delay, error):
                logger.warning(
                    "attempt %d at %s %s from %s failed, again in %s: %s",
                    event.attempt.attempt_count,
                    message.routing_key,
                    message.id,
                    queue,
                    in_words(delay),
                    _first_line(error),
                )
            case Dead(reason, error):
                logger.log(
                    logging.ERROR if reason is Reason.UNDECODABLE else logging.WARNING,
                    "%s %s from %s is dead (%s): %s",
                    message.routing_key,
                    message.id,
                    queue,
                    reason,
                    _first_line(error),
                )
            case Released():
                logger.debug("gave back %s %s to %s", message.routing_key, message.id, queue)

    def _relayed(self, event: Relayed) -> None:
        message = event.attempt.message
        match event.outcome:
            case Done():
                logger.info("sent %s %s", message.routing_key, message.id)
            case RetryIn(delay, error):
                logger.warning(
                    "%s %s was not sent, again in %s: %s",
                    message.routing_key,
                    message.id,
                    in_words(delay),
                    _first_line(error),
                )
            case Dead(reason, error):
                logger.warning("%s %s is dead (%s): %s", message.routing_key, message.id, reason, _first_line(error))
            case Released():
                logger.debug("gave back %s %s", message.routing_key, message.id)

    def _lease_lost(self, event: LeaseWasLost) -> None:
        logger.warning(
            "lease lost on row %d of %s: its %s write was refused; if this recurs, listeners outlast their lease",
            event.row_id,
            event.queue,
            event.phase,
            extra={
                "event": "lease_lost",
                "phase": event.phase,
                "row_id": event.row_id,
                "queue": event.queue,
                "deliveries_count": event.deliveries_count,
            },
        )


def _words(error: BaseException) -> str:
    # SQLAlchemy's texts end with the statement and its parameters: bodies do not belong in a log.
    return f"{type(error).__name__}: {_first_line(str(error))}"


def _place(destination: str | None) -> str:
    return "the destination" if destination is None else destination


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:500]
