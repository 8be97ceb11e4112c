"""Bodies: what follows a request's head, read within limits before it is known who sent it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from outbox.inbound.http.request import too_large
from outbox.inbound.http.response import Declined, Receive, Scope, not_now

FIRST = 5.0  # seconds that a body has, however large
LEAST_RATE = 16 * 1024  # bytes for which it has another second
AFTER_DISPLACEMENT = 1  # seconds after which a sender may try again what others displaced


@dataclass(slots=True, eq=False)
class _Reading:
    """A body on its way."""

    deadline: asyncio.Timeout
    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    is_displaced: bool = False


class Bodies:
    """Reads bodies of one event loop, so many at once.

    Any client can begin a request and send it slowly. So where all places are taken, a new one displaces that which
    has waited longest for its next bytes: a sender without a pause is read, however many others wait.
    """

    def __init__(self, *, largest: int, most_at_once: int, within: float) -> None:
        self._largest = largest
        self._most_at_once = most_at_once
        self._within = within
        self._readings: dict[_Reading, None] = {}  # the longest without new bytes first

    @property
    def under_way(self) -> int:
        return len(self._readings)

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """A request's body, no more of it than the largest has, at the least rate or faster."""
        began = asyncio.get_running_loop().time()
        reading = _Reading(asyncio.timeout_at(began + self._time_for(0)))
        try:
            async with reading.deadline:
                self._enter(reading)
                return await self._parts(reading, receive, began)
        except TimeoutError:
            raise self._too_slow(reading, scope) from None
        finally:
            self._readings.pop(reading, None)

    def _enter(self, reading: _Reading) -> None:
        if len(self._readings) >= self._most_at_once:
            displaced = next(iter(self._readings))
            del self._readings[displaced]
            if not displaced.deadline.expired():
                displaced.is_displaced = True
                displaced.deadline.reschedule(0)
        self._readings[reading] = None

    async def _parts(self, reading: _Reading, receive: Receive, began: float) -> bytes:
        while True:
            event = await receive()
            if reading.is_displaced or reading.deadline.expired():
                raise TimeoutError  # in spite of these bytes, which came at the same time
            if event["type"] == "http.disconnect":
                # No client hears it. But a middleware that saw no answer would take that for a fault.
                raise Declined(400, "the connection ended before the request did")
            if part := event.get("body", b""):
                reading.parts.append(part)
                reading.size += len(part)
                if reading.size > self._largest:
                    raise too_large(self._largest)
                self._go_on(reading, began + self._time_for(reading.size))
            if not event.get("more_body", False):
                return b"".join(reading.parts)

    def _go_on(self, reading: _Reading, until: float) -> None:
        reading.deadline.reschedule(until)
        del self._readings[reading]
        self._readings[reading] = None

    def _time_for(self, size: int) -> float:
        """How many seconds after its beginning more than this of a body must be there."""
        return min(self._within, FIRST + size / LEAST_RATE)

    def _too_slow(self, reading: _Reading, scope: Scope) -> Declined:
        if reading.is_displaced:
            declined = not_now(
                "the request came slower than others, which took its place: send it again", AFTER_DISPLACEMENT
            )
        else:
            line = f"the request did not arrive within {self._within:g} s, or by less than {LEAST_RATE} bytes a second"
            declined = Declined(408, line)
        if scope.get("http_version", "1.1").startswith("1"):  # later versions have no such header
            declined.response = replace(declined.response, headers={**declined.response.headers, "connection": "close"})
        return declined
