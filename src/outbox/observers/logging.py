"""Observers: all of them as one, and events as log records under the logger `outbox`. Bodies are never logged."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, get_args

from outbox.core.attempt import Attempt, Dead, Done, Reason, Released, RetryIn
from outbox.core.backoff import DATABASE, TRANSPORT
from outbox.core.durations import in_words
from outbox.core.errors import described
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
    Observer,
    Received,
    Recovered,
    Relayed,
    RequestDeclined,
    Routed,
    SlotInUse,
    SlotTaken,
    Started,
    StillRunning,
    Stopped,
    Troubled,
    Unbound,
    Unroutable,
    Unsettled,
)
from outbox.core.message import Message
from outbox.core.printing import in_bytes, printable
from outbox.observers.outages import Outages, missing

logger = logging.getLogger("outbox")

# `StillRunning` is still_running.
_NAMES = {kind: re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower() for kind in get_args(Event)}


def _escape_arguments(record: logging.LogRecord) -> bool:
    """Keep line breaks, marks of direction and the like out of a record: ids and keys may come from other programs."""
    if isinstance(record.args, tuple):
        record.args = tuple(printable(each) if isinstance(each, str) else each for each in record.args)
    return True


logger.addFilter(_escape_arguments)


class Observers:
    """Several observers as one. An observer's error is logged and forgotten: it must not stop the work it watches."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def __call__(self, event: Event) -> None:
        for observer in self._observers:
            try:
                observer(event)
            except Exception:
                logger.exception("the observer %r failed", observer)

    @contextmanager
    def joined_by(self, observer: Observer) -> Iterator[None]:
        """Add an observer for the events of this block."""
        self._observers = (*self._observers, observer)
        try:
            yield
        finally:
            self._observers = tuple(each for each in self._observers if each is not observer)


class LoggingObserver:
    """DEBUG: bindings, batches. INFO: work. WARNING: retries, dead letters, lost leases, advice. ERROR: failures.

    An outage is a line when it begins, one a minute, and one when it ends. Each record has its ids as attributes too.
    """

    def __init__(self) -> None:
        self._outages = Outages()

    def __call__(self, event: Event) -> None:
        match event:
            case Handled():
                self._handled(event)
            case Relayed():
                self._relayed(event)
            case Emitted(messages):
                if logger.isEnabledFor(logging.INFO):
                    for message in messages:
                        facts = _facts(event, message)
                        logger.info("emitted %s %s", message.routing_key, message.id, extra=facts)
            case Troubled():
                self._troubled(event)
            case Recovered():
                self._recovered(event)
            case CircuitOpened():
                self._circuit_opened(event)
            case CircuitClosed(destination):
                if not self._answers(event, destination):  # another relay has opened it
                    logger.info("%s answers again", _place(destination), extra=_facts(event, destination=destination))
            case LeaseWasLost():
                self._lease_lost(event)
            case _:
                self._others(event)

    def _others(self, event: Event) -> None:
        match event:
            case Bound(binding):
                facts = _facts(event, queue=binding.queue, binding_key=binding.binding_key)
                logger.debug("the queue %s is bound to %s", binding.queue, binding.binding_key, extra=facts)
            case Unbound(binding):
                facts = _facts(event, queue=binding.queue, binding_key=binding.binding_key)
                logger.info("the queue %s is bound to %s no more", binding.queue, binding.binding_key, extra=facts)
            case Routed(queue, count):
                logger.debug("routed %d message(s) to %s", count, queue, extra=_facts(event, queue=queue, count=count))
            case Unroutable(routing_key, count):
                logger.warning(
                    "no queue is bound to %s: %d message(s) wait; start a worker that listens, or see unroutable=",
                    routing_key,
                    count,
                    extra=_facts(event, routing_key=routing_key, count=count),
                )
            case Received():
                self._received(event)
            case Conflicted(queue, attempt, run, error, pause):
                logger.info(
                    "run %d of %s %s from %s collided with another transaction, again in %s: %s",
                    run,
                    attempt.message.routing_key,
                    attempt.message.id,
                    queue,
                    in_words(pause),
                    _words(error),
                    extra=_facts(event, attempt, queue=queue),
                )
            case StillRunning(queue, attempt, duration):
                logger.warning(
                    "%s %s from %s has been running for %s",
                    attempt.message.routing_key,
                    attempt.message.id,
                    queue,
                    in_words(duration),
                    extra=_facts(event, attempt, queue=queue, seconds=duration.total_seconds()),
                )
            case Unsettled(queue, attempt):
                logger.debug(
                    "%s %s from %s comes again: how it ended could not be written",
                    attempt.message.routing_key,
                    attempt.message.id,
                    queue,
                    extra=_facts(event, attempt, queue=queue),
                )
            case CleanedUp(what, count):
                logger.debug("cleaned up %d %s rows", count, what, extra=_facts(event, what=what, count=count))
            case SlotTaken(slot, retained):
                text = "the relay reads the write-ahead log by the slot %s, which holds back %s of it"
                kept = "nothing" if not retained else in_bytes(retained)
                logger.info(text, slot, kept, extra=_facts(event, slot=slot, retained_bytes=retained))
            case SlotInUse(slot, holder):
                text = "the relay stands by: the slot %s is in use (%s)"
                logger.info(text, slot, _first_line(holder), extra=_facts(event, slot=slot))
            case Started(what, detail):
                logger.info("%s started: %s", what, detail, extra=_facts(event, what=what))
            case Stopped(what, abandoned):
                facts = _facts(event, what=what, abandoned=abandoned)
                if abandoned:
                    text = "%s stopped, %d listeners did not end in time and were abandoned"
                    logger.warning(text, what, abandoned, extra=facts)
                else:
                    logger.info("%s stopped", what, extra=facts)
            case Failed(what, error):
                text = "%s ended by itself and is not started again: %s"
                logger.error(text, what, _words(error), extra=_facts(event, what=what))
            case HookFailed(what, error):
                text = "%s failed after the commit, which stands: %s"
                logger.error(text, what, _words(error), extra=_facts(event, what=what))
            case RequestDeclined(status, why):
                level = logging.WARNING if status >= 500 else logging.INFO
                facts = _facts(event, status=status)
                logger.log(level, "declined a request with %d: %s", status, _first_line(why), extra=facts)
            case Advised(where, advice):
                logger.warning("%s: %s", where, _first_line(advice), extra=_facts(event, where=where))

    def _handled(self, event: Handled) -> None:
        message, queue, attempt = event.attempt.message, event.queue, event.attempt
        match event.outcome:
            case Done():
                if logger.isEnabledFor(logging.INFO):
                    logger.info(
                        "handled %s %s from %s in %s",
                        message.routing_key,
                        message.id,
                        queue,
                        in_words(event.duration),
                        extra=_facts(event, attempt, queue=queue, seconds=event.duration.total_seconds()),
                    )
            case RetryIn(delay, error):
                logger.warning(
                    "attempt %d at %s %s from %s failed, again in %s: %s",
                    attempt.attempt_count,
                    message.routing_key,
                    message.id,
                    queue,
                    in_words(delay),
                    _first_line(error),
                    extra=_facts(event, attempt, queue=queue, retry_in=delay.total_seconds()),
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
                    extra=_facts(event, attempt, queue=queue, reason=reason.value),
                )
            case Released():
                if logger.isEnabledFor(logging.DEBUG):
                    facts = _facts(event, attempt, queue=queue)
                    logger.debug("gave back %s %s to %s", message.routing_key, message.id, queue, extra=facts)

    def _relayed(self, event: Relayed) -> None:
        message, attempt, to = event.attempt.message, event.attempt, event.destination
        match event.outcome:
            case Done():
                if self._outages:  # another relay may have closed the circuit that was opened here
                    self._answers(event, event.destination)
                if logger.isEnabledFor(logging.INFO):
                    logger.info(
                        "sent %s %s", message.routing_key, message.id, extra=_facts(event, attempt, destination=to)
                    )
            case RetryIn(delay, error):
                logger.warning(
                    "%s %s was not sent, again in %s: %s",
                    message.routing_key,
                    message.id,
                    in_words(delay),
                    _first_line(error),
                    extra=_facts(event, attempt, destination=to, retry_in=delay.total_seconds()),
                )
            case Dead(reason, error):
                logger.warning(
                    "%s %s is dead (%s): %s",
                    message.routing_key,
                    message.id,
                    reason,
                    _first_line(error),
                    extra=_facts(event, attempt, destination=to, reason=reason.value),
                )
            case Released():
                if logger.isEnabledFor(logging.DEBUG):
                    facts = _facts(event, attempt, destination=to)
                    logger.debug("gave back %s %s", message.routing_key, message.id, extra=facts)

    def _received(self, event: Received) -> None:
        queue, facts = event.queue, _facts(event, queue=event.queue)
        if event.unwanted:
            text = "%d message(s) received for %s are dead: no listener has it"
            logger.warning(text, event.unwanted, queue, extra=facts)
        elif event.expired:
            text = "%d message(s) received for %s are dead: older than its inbox"
            logger.warning(text, event.expired, queue, extra=facts)
        else:
            text = "stored %d message(s) in %s, %d were there before"
            logger.debug(text, event.stored, queue, event.duplicates, extra=facts)

    # Outages. What began with an error ends with a warning, so that a log has both or neither.

    def _troubled(self, event: Troubled) -> None:
        lasts: timedelta | None = timedelta(0)
        if event.outage_of is not None:
            lasts = self._outages.strikes(missing(event), event.where)
        if lasts is not None:
            logger.error(
                "%s: %s; again in %s%s",
                event.where,
                _words(event.error),
                in_words(event.pause),
                _so_far(lasts),
                extra=_facts(event, where=event.where, outage_of=event.outage_of),
            )

    def _recovered(self, event: Recovered) -> None:
        what = missing(event)
        lasted = self._outages.ends(what, event.where)
        if lasted is not None:
            text = "%s answers again after %s" if what == DATABASE else "%s works again after %s"
            facts = _facts(event, where=event.where, outage_of=event.outage_of, seconds=lasted.total_seconds())
            logger.warning(text, what if what == DATABASE else event.where, in_words(lasted), extra=facts)

    def _circuit_opened(self, event: CircuitOpened) -> None:
        lasts = self._outages.strikes(event.destination or TRANSPORT, _place(event.destination))
        if lasts is not None:
            logger.error(
                "%s takes nothing%s, the next attempt is in %s: %s",
                _place(event.destination),
                _so_far(lasts),
                in_words(event.pause),
                _first_line(event.error),
                extra=_facts(event, destination=event.destination),
            )

    def _answers(self, event: Event, destination: str | None) -> bool:
        """Whether an outage of this destination has ended by it."""
        lasted = self._outages.ends(destination or TRANSPORT, _place(destination))
        if lasted is None:
            return False
        facts = _facts(event, destination=destination, seconds=lasted.total_seconds())
        logger.warning("%s answers again after %s", _place(destination), in_words(lasted), extra=facts)
        return True

    def _lease_lost(self, event: LeaseWasLost) -> None:
        logger.warning(
            "lease lost on row %d of %s: its %s write was refused; if this recurs, listeners outlast their lease",
            event.row_id,
            event.queue,
            event.phase,
            extra=_facts(
                event,
                event="lease_lost",
                phase=event.phase,
                row_id=event.row_id,
                queue=event.queue,
                deliveries_count=event.deliveries_count,
            ),
        )


def _facts(happened: Event, about: Message | Attempt | None = None, **facts: Any) -> dict[str, Any]:
    """What a record says, as attributes for handlers that write fields. Text is escaped as in the line itself."""
    found: dict[str, Any] = {"event": _NAMES[type(happened)]}
    if about is not None:
        if isinstance(about, Attempt):
            found["attempt"] = about.attempt_count
        message = about.message if isinstance(about, Attempt) else about
        found["message_id"], found["routing_key"] = printable(message.id), printable(message.routing_key)
    for name, value in facts.items():
        if value is not None:
            found[name] = printable(value) if isinstance(value, str) else value
    return found


def _so_far(lasts: timedelta) -> str:
    return f", for {in_words(lasts)} now" if lasts else ""


def _words(error: BaseException) -> str:
    # SQLAlchemy's texts end with the statement and its parameters: bodies do not belong in a log.
    return _first_line(described(error))


def _place(destination: str | None) -> str:
    return "the destination" if destination is None else destination


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:500]
