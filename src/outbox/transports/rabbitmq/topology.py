"""Topology: the exchanges, queues and bindings that listeners need. Names and arguments only, nothing is connected to.

relay ─► outbox (topic) ─► billing ──────────────► worker
                             ▲  │ dead letters        │ retries, with the queue's name as routing key
                             │  ▼                     ▼
                             │ outbox.dlx (direct)   outbox.delay_10s (fanout)
                             │  ▼                     ▼
                             │ billing.dlq           outbox.delay_10s (10 s to live)
                             └────────────────────────┘ by the default exchange, to that queue alone
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from outbox.core.binding import LONGEST_KEY, check_name
from outbox.core.durations import in_words
from outbox.core.errors import ConfigurationError
from outbox.core.listener import Listener
from outbox.core.retry import RetryPolicy

DEAD_LETTER_SUFFIX = ".dlq"
LONGEST_DELAY = timedelta(milliseconds=2**32 - 1)  # the longest time to live that RabbitMQ takes
_LONGEST_SUFFIX = len(".delay_49d23h59m59s999ms")
# RabbitMQ takes more, its client does not.
_LONGEST_EXCHANGE = 127
_NAME = re.compile(r"[a-zA-Z0-9\-_.:@#,/+ ]*")

# Each delay is a queue, so one that cannot be listed beforehand is rounded up to the next of these.
STEPS = tuple(
    timedelta(seconds=seconds)
    for seconds in (
        *(0, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30),
        *(60 * minutes for minutes in (1, 2, 5, 10, 20, 30)),
        *(3600 * hours for hours in (1, 2, 6, 12)),
        *(86_400 * days for days in (1, 2, 5, 10, 20, 40)),
    )
)

# A delivery limit of -1 means none from RabbitMQ 4.0 on, where 20 is the default; before, it condemns every message.
_LIMITS_BY_DEFAULT = (4,)
_TRIED_FOR = timedelta(seconds=1)  # a copy comes back so long after its publish, if the worker that tried it has died
WAY_BACK = timedelta(seconds=1)  # where listeners have no delay: some users may publish to their queue by one alone
_UNUSED_FOR = timedelta(hours=1)  # after which the trial queue of a process that has ended is deleted
_QUORUM = {"x-queue-type": "quorum"}
# Without both, a broker that dies while it hands a message on to another queue loses it.
_HANDED_ON = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}


@dataclass(frozen=True, slots=True)
class Exchange:
    """A durable exchange."""

    name: str
    kind: str  # "topic", "direct" or "fanout"


@dataclass(frozen=True, slots=True)
class Queue:
    """A durable queue."""

    name: str
    arguments: Mapping[str, object] = field(hash=False)


@dataclass(frozen=True, slots=True)
class QueueBinding:
    """What an exchange hands to a queue."""

    exchange: str
    queue: str
    routing_key: str


@dataclass(frozen=True, slots=True)
class Names:
    """How everything at the broker is called."""

    exchange_name: str = "outbox"
    queue_prefix: str = ""  # what the names of queues begin with; exchanges are told apart by `exchange_name`

    def __post_init__(self) -> None:
        _check_own(self.exchange_name, "exchange_name", _LONGEST_EXCHANGE - _LONGEST_SUFFIX)
        if self.queue_prefix:
            _check_own(self.queue_prefix, "queue_prefix", LONGEST_KEY)

    @property
    def exchange(self) -> str:
        return self.exchange_name

    @property
    def dead_letter_exchange(self) -> str:
        return f"{self.exchange_name}.dlx"

    @property
    def marker(self) -> str:
        """An exchange without messages: where it exists, delay queues send messages back as this page says."""
        return f"{self.exchange_name}.topology_v1"

    def queue(self, listener_queue: str) -> str:
        name = self.queue_prefix + listener_queue
        _check_own(name, "queue", LONGEST_KEY - len(DEAD_LETTER_SUFFIX))
        return name

    def dead_letter_queue(self, queue: str) -> str:
        return f"{queue}{DEAD_LETTER_SUFFIX}"

    @property
    def dead_letter_lock(self) -> str:
        """A queue that exists while a command reads dead letters."""
        return f"{self.exchange_name}.dead_letters"

    @property
    def delay_prefix(self) -> str:
        return f"{self.exchange_name}.delay_"

    def delay(self, delay: timedelta) -> str:
        """`outbox.delay_10s`, `outbox.delay_500ms`, `outbox.delay_1h30m`: an exchange and the queue behind it."""
        return f"{self.delay_prefix}{_spelled(_milliseconds(delay))}"

    @property
    def trial_prefix(self) -> str:
        return f"{self.exchange_name}.trial_"

    def isolation_queue(self, id: str) -> str:
        """A queue of one process, in which it tries suspected messages."""
        return f"{self.trial_prefix}{id}"

    def owns(self, exchange: str) -> bool:
        """Whether an exchange is one of these, of whichever listeners."""
        return exchange in (self.exchange, self.dead_letter_exchange) or exchange.startswith(self.delay_prefix)


@dataclass(frozen=True, slots=True)
class Topology:
    """What there must be, in an order in which it can be declared: the marker comes last, when all else is there."""

    names: Names
    exchanges: tuple[Exchange, ...]
    queues: tuple[Queue, ...]
    bindings: tuple[QueueBinding, ...]
    publishes: tuple[str, ...] = ()  # exchanges to which the user that needs this must be able to publish
    marker: Exchange | None = None  # none: this is only a part

    @classmethod
    def of_relay(cls, names: Names) -> Topology:
        """What a relay needs: queues are no business of its."""
        return cls(names, (Exchange(names.exchange, "topic"),), queues=(), bindings=(), publishes=(names.exchange,))

    @classmethod
    def of(
        cls,
        names: Names,
        listeners: Sequence[Listener],
        default_delays: Sequence[timedelta],
        *,
        server_version: tuple[int, ...] | None = None,
        steps: bool = False,  # with all that a function or jitter may ask for
        way_back: bool = False,  # with one delay at least
    ) -> Topology:
        """What these listeners need; `default_delays` are for those that have no retry policy of their own."""
        wanted = (*_delays(listeners, default_delays), *(STEPS * steps)) or (WAY_BACK,) * way_back
        delays = {_milliseconds(delay): delay for delay in wanted}
        parts = [cls.of_delay(names, delays[milliseconds]) for milliseconds in sorted(delays)]
        limits = _limits(server_version)
        queues = [names.queue(listener.queue) for listener in listeners]
        topology = cls(
            names,
            exchanges=(
                Exchange(names.exchange, "topic"),
                Exchange(names.dead_letter_exchange, "direct"),
                *(exchange for part in parts for exchange in part.exchanges),
            ),
            # What hands messages on comes after what takes them.
            queues=(
                *(dead_letter_queue(names, queue, server_version) for queue in queues),
                *(Queue(queue, _listener_arguments(names, queue) | limits) for queue in queues),
                *(queue for part in parts for queue in part.queues),
            ),
            bindings=(
                *(QueueBinding(names.dead_letter_exchange, names.dead_letter_queue(queue), queue) for queue in queues),
                *(binding for part in parts for binding in part.bindings),
                *(
                    QueueBinding(names.exchange, queue, listener.binding_key)
                    for queue, listener in zip(queues, listeners, strict=True)
                ),
            ),
            publishes=tuple(name for part in parts for name in part.publishes),
            marker=Exchange(names.marker, "direct"),
        )
        _check_unique(queue.name for queue in topology.queues)
        return topology

    @classmethod
    def of_delay(cls, names: Names, delay: timedelta) -> Topology:
        """What one delay needs: the exchange that takes retries and the queue that holds them back."""
        name = names.delay(delay)
        # The default exchange, and no routing key of its own: the message goes where its routing key says, and that is
        # the queue whose listener failed.
        arguments = {"x-message-ttl": _milliseconds(delay), "x-dead-letter-exchange": ""}
        return cls(
            names,
            exchanges=(Exchange(name, "fanout"),),
            queues=(Queue(name, _QUORUM | arguments | _HANDED_ON),),
            bindings=(QueueBinding(name, name, ""),),
            publishes=(name,),
        )

    @classmethod
    def of_trials(cls, names: Names, name: str, queue: str, back_by: str = "") -> Topology:
        """What one process needs to try suspected messages of a queue: what it does not take goes back there.

        By the default exchange, or, where a user may not write to that one, by a delay. Then messages come here by the
        exchange of dead letters, which every worker may write to.
        """
        arguments = {
            "x-message-ttl": _milliseconds(_TRIED_FOR),
            "x-expires": _milliseconds(_UNUSED_FOR),
            "x-dead-letter-exchange": back_by,
            "x-dead-letter-routing-key": queue,
        }
        bindings = (QueueBinding(names.dead_letter_exchange, name, name),) if back_by else ()
        return cls(names, exchanges=(), queues=(Queue(name, _QUORUM | arguments | _HANDED_ON),), bindings=bindings)

    @property
    def delays(self) -> tuple[str, ...]:
        """The names of the delay exchanges."""
        return tuple(exchange.name for exchange in self.exchanges if exchange.kind == "fanout")

    @property
    def consumed(self) -> tuple[str, ...]:
        """The listeners' own queues."""
        return tuple(binding.queue for binding in self.bindings if binding.exchange == self.names.exchange)

    @property
    def shortest_delay(self) -> str | None:
        """The delay exchange behind which messages wait least."""
        return self.nearest_delay(timedelta(0))

    def nearest_delay(self, wanted: timedelta) -> str | None:
        """Of the delay exchanges that are there: the next behind which messages wait so long, else the longest."""
        ttl = {queue.name: queue.arguments["x-message-ttl"] for queue in self.queues if queue.name in self.delays}
        waits = sorted(ttl, key=lambda name: int(str(ttl[name])))
        enough = (name for name in waits if int(str(ttl[name])) >= _milliseconds(wanted))
        return next(enough, waits[-1] if waits else None)

    def delay(self, wanted: timedelta) -> timedelta:
        """How long a retry is held back: as long as it wants if there is a queue for that, else for the next step."""
        return wanted if wanted <= LONGEST_DELAY and self.names.delay(wanted) in self.delays else step(wanted)


def dead_letter_queue(names: Names, queue: str, server_version: tuple[int, ...] | None) -> Queue:
    """The queue of the dead letters of a queue, without a limit of any kind."""
    return Queue(names.dead_letter_queue(queue), _QUORUM | _limits(server_version))


def server_version(text: str) -> tuple[int, ...] | None:
    """`(3, 10, 8)` from what a server says of itself; None if that is no version."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found.group().split("."))) if found else None


def step(delay: timedelta) -> timedelta:
    """The next of the STEPS that is not shorter; the longest for everything beyond."""
    return STEPS[min(bisect_left(STEPS, delay), len(STEPS) - 1)]


def open_ended(listener: Listener, default: RetryPolicy) -> bool:
    """Whether a listener's delays cannot be listed beforehand."""
    return (listener.retry_policy or default).known_delays() is None


def _delays(listeners: Sequence[Listener], default_delays: Sequence[timedelta]) -> Iterable[timedelta]:
    for listener in listeners:
        if listener.retry_policy is None:
            yield from default_delays
        else:
            yield from listener.retry_policy.known_delays() or ()


def _listener_arguments(names: Names, queue: str) -> dict[str, object]:
    return {
        **_QUORUM,
        "x-dead-letter-exchange": names.dead_letter_exchange,
        "x-dead-letter-routing-key": queue,
        **_HANDED_ON,
    }


def _limits(server_version: tuple[int, ...] | None) -> dict[str, object]:
    return {"x-delivery-limit": -1} if server_version is not None and server_version >= _LIMITS_BY_DEFAULT else {}


def _milliseconds(delay: timedelta) -> int:
    if delay > LONGEST_DELAY:
        raise ConfigurationError(
            f"a retry delay of {in_words(delay)}: RabbitMQ holds a message back for {in_words(LONGEST_DELAY)} at most"
        )
    return -(-delay // timedelta(milliseconds=1))  # rounded up: a delay is the least that is waited


def _spelled(milliseconds: int) -> str:
    """Whole seconds below an hour as seconds only: each duration is written in one way."""
    seconds, rest = divmod(milliseconds, 1000)
    if seconds < 3600:
        return f"{milliseconds}ms" if rest else f"{seconds}s"
    words = []
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, milliseconds = divmod(milliseconds, size)
        if count:
            words.append(f"{count}{unit}")
    return "".join(words)


def _check_own(name: str, what: str, longest: int) -> None:
    check_name(name, what)
    if len(name.encode()) > longest:
        raise ConfigurationError(f"a {what} has at most {longest} bytes on RabbitMQ: {name[:40]!r}… has more")
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{what}={name!r}: names at RabbitMQ have a-z A-Z 0-9, spaces and - _ . : @ # , / + only, so choose another"
        )
    if name.startswith("amq."):
        raise ConfigurationError(f"{what}={name!r}: RabbitMQ keeps names that begin with amq. to itself")


def _check_unique(queues: Iterable[str]) -> None:
    seen: set[str] = set()
    for queue in queues:
        if queue in seen:
            raise ConfigurationError(
                f"two queues would be called {queue!r}: `.dlq` is for dead letters and `.delay_…` for retries, so a "
                "listener needs another queue="
            )
        seen.add(queue)
