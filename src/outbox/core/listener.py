"""Listener: a callback with the binding key and the queue it listens on."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from outbox.core.binding import Binding, check_binding_key
from outbox.core.durations import Seconds, as_lifetime, configured
from outbox.core.errors import ConfigurationError
from outbox.core.listener_options import (
    IsolationLevel,
    Lane,
    OnError,
    SessionFactory,
    Timeout,
    check_factory,
    check_lane,
    check_level,
    check_on_error,
    fixed_limit,
    is_factory,
)
from outbox.core.retry import RetryDelays, RetryPolicy, as_retry_policy


@dataclass(frozen=True)
class Listener:
    """A declaration that any number of workers may serve. Calling it calls the callback."""

    binding_key: str
    callback: Callable[..., Any]
    queue: str = ""  # default: the callback's module and name
    retry_delays: RetryDelays | None = None  # default: those of setup()
    concurrency: int = 10  # how many messages of this queue, or lists of them, one worker handles at a time
    timeout: Timeout | None = None  # default: 15 s if the callback asks for a session, none otherwise
    lease: Seconds | None = None  # default: that of setup()
    max_crashes: int = 3  # worker deaths after which a message is dead
    store_first: bool = False  # store a broker's deliveries in the database, and handle them from there
    lane: Lane | None = None  # messages of one lane are handled one at a time: a name, or a function of the message
    isolation_level: IsolationLevel | None = None  # default: that of the database
    session_factory: SessionFactory | None = None  # default: sessions of the outbox's own engine
    on_error: OnError | None = None  # called after a failed attempt, with the error, message, a session and attempt
    batch: int | None = None  # most messages in one call; default: the callback takes one message, not a list

    retry_policy: RetryPolicy | None = field(init=False, repr=False, compare=False)
    time_limit: timedelta | None = field(init=False, repr=False, compare=False)  # unless `timeout` is a function
    lease_time: timedelta | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.callback):
            raise ConfigurationError(f"a listener's callback must be callable, not {self.callback!r}")
        self._set("queue", self.queue or _queue_name(self.callback))
        Binding(self.queue, self.binding_key)  # checks both
        check_binding_key(self.binding_key)
        if isinstance(self.concurrency, bool) or not isinstance(self.concurrency, int) or self.concurrency < 1:
            raise ConfigurationError(f"{self.queue}: concurrency={self.concurrency!r}, at least 1")
        if isinstance(self.max_crashes, bool) or not isinstance(self.max_crashes, int) or self.max_crashes < 1:
            raise ConfigurationError(f"{self.queue}: max_crashes={self.max_crashes!r}, at least 1")
        if not isinstance(self.store_first, bool):
            raise ConfigurationError(f"{self.queue}: store_first={self.store_first!r}, True or False")
        policy = self.retry_delays
        self._set("retry_policy", None if policy is None else as_retry_policy(policy))
        self._set("time_limit", fixed_limit(self.timeout))
        self._set("lease_time", None if self.lease is None else configured(as_lifetime, self.lease, what="lease"))
        check_lane(self.lane)
        check_level(self.isolation_level)
        check_factory(self.session_factory)
        check_on_error(self.on_error)
        self._check_batch()

    def __hash__(self) -> int:
        return hash((self.binding_key, self.queue))  # the rest need not be hashable: a list of delays is not

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.callback(*args, **kwargs)

    @property
    def appetite(self) -> int:
        """How many messages it has at work when every place is taken."""
        return self.concurrency * (self.batch or 1)

    @property
    def isolated_at(self) -> int | None:
        """How many crashes make a message's next run one that has the process to itself; none: it is dead by then."""
        return self.max_crashes - 1 if self.max_crashes > 1 else None

    @property
    def binding(self) -> Binding:
        return Binding(self.queue, self.binding_key)

    def _check_batch(self) -> None:
        """A call is about many messages then: an option that is about one of them would see the first alone."""
        if self.batch is None:
            return
        if isinstance(self.batch, bool) or not isinstance(self.batch, int) or self.batch < 1:
            raise ConfigurationError(f"{self.queue}: batch={self.batch!r}, at least 1 message in a list")
        if self.lane is not None:
            raise ConfigurationError(f"{self.queue}: messages come in lists or in lanes: remove batch= or lane=")
        of_one_message = {
            "timeout": callable(self.timeout),
            "isolation_level": callable(self.isolation_level),
            "session_factory": callable(self.session_factory) and not is_factory(self.session_factory),
        }
        for option, refused in of_one_message.items():
            if refused:
                raise ConfigurationError(
                    f"{self.queue}: {option} is a function of one message, and batch={self.batch} gives many to one "
                    "call: make it a value, or remove batch="
                )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def listen(
    binding_key: str,
    *,
    queue: str = "",
    retry_delays: RetryDelays | None = None,
    concurrency: int = 10,
    timeout: Timeout | None = None,
    lease: Seconds | None = None,
    max_crashes: int = 3,
    store_first: bool = False,
    lane: Lane | None = None,
    isolation_level: IsolationLevel | None = None,
    session_factory: SessionFactory | None = None,
    on_error: OnError | None = None,
    batch: int | None = None,
) -> Callable[[Callable[..., Any]], Listener]:
    """Make a function a Listener: `listen(binding_key, …)(callback)` is `Listener(binding_key, callback, …)`."""

    check_binding_key(binding_key)

    def decorate(callback: Callable[..., Any]) -> Listener:
        return Listener(
            binding_key,
            callback,
            queue=queue,
            retry_delays=retry_delays,
            concurrency=concurrency,
            timeout=timeout,
            lease=lease,
            max_crashes=max_crashes,
            store_first=store_first,
            lane=lane,
            isolation_level=isolation_level,
            session_factory=session_factory,
            on_error=on_error,
            batch=batch,
        )

    return decorate


def check_listeners(listeners: Sequence[Listener]) -> None:
    """Refuse listeners that one worker cannot serve side by side, and warn about names that will not last."""
    if isinstance(listeners, Listener):
        raise ConfigurationError("a worker takes a list of listeners: write [listener]")
    queues: set[str] = set()
    for listener in listeners:
        if not isinstance(listener, Listener):
            raise ConfigurationError(f"{listener!r} is no Listener: decorate it with @listen(binding_key)")
        if listener.queue in queues:
            raise ConfigurationError(f"two listeners share the queue {listener.queue!r}: one needs another queue=")
        queues.add(listener.queue)
        if listener.queue.startswith("__main__."):
            warnings.warn(
                f"the queue {listener.queue!r} is named after __main__ and changes when code moves: give it a queue=",
                stacklevel=3,
            )
    if not listeners:
        raise ConfigurationError("a worker needs at least one listener")


def _queue_name(callback: Callable[..., Any]) -> str:
    while isinstance(callback, functools.partial):
        callback = callback.func
    named = callback if hasattr(callback, "__qualname__") else type(callback)
    return f"{named.__module__}.{named.__qualname__}".replace(".<locals>", "")
