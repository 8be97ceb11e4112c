"""Breaker: keeps a relay from a destination that does not answer, together with all other relays."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

from outbox.core.backoff import RestartDelay, chosen_pause
from outbox.core.durations import NO_DELAY
from outbox.core.errors import TransportUnavailable
from outbox.core.events import CircuitClosed, CircuitOpened, Observer
from outbox.core.store import Circuit, CircuitState, Store

LOOK_EVERY = 1.0  # seconds between two looks at what other relays found out
SHORTEST, LONGEST = 1.0, 7.5  # seconds of pause, doubling: a destination that is back is asked within ten
LONGEST_TURN = 1.0  # seconds that a round or a probe without an answer keeps others back
REFUSALS = 10  # unspecific refusals in a row, after which a destination refuses everything
REFUSED_FOR = 15 * 60.0  # seconds for which that is a mistake that passes; then it is what the destination means
JITTER = 0.2  # of a pause, either way: relays of many services must not come back at the same moment


class Circuits:
    """What the database says of all destinations, shared by the relays of a process. Closed ones are left out."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._looking = asyncio.Lock()
        self._looked_at = float("-inf")
        self._known: dict[str | None, Circuit] = {}
        self._refusing: dict[str | None, float] = {}  # since when, by this process's clock; closed circuits, too

    def known(self, destination: str | None) -> Circuit | None:
        """What the last look found."""
        return self._known.get(destination)

    async def look(self, destination: str | None) -> Circuit | None:
        """What is so now, or was a moment ago."""
        async with self._looking:
            if self._clock() - self._looked_at >= LOOK_EVERY:
                looked_at = self._clock()
                found = await self._store.circuits.all()
                self._known = {each.destination: each for each in found if each.state is not CircuitState.CLOSED}
                self._refusing = {
                    each.destination: looked_at - each.refusing.total_seconds()
                    for each in found
                    if each.refusing is not None
                }
                self._looked_at = looked_at
        return self.known(destination)

    def remaining(self, destination: str | None) -> float:
        """Seconds for which no relay is to ask this destination."""
        circuit = self.known(destination)
        if circuit is None:
            return 0.0
        return max(0.0, circuit.remaining.total_seconds() - (self._clock() - self._looked_at))

    def refusing(self, destination: str | None) -> float | None:
        """Seconds for which this destination has refused everything; none: it did not, or took something since."""
        since = self._refusing.get(destination)
        return None if since is None else self._clock() - since

    def forget(self) -> None:
        """The next look asks the database."""
        self._looked_at = float("-inf")

    def closed(self, destination: str | None, *, refusing: bool) -> None:
        """A relay of this process had an answer."""
        self._known.pop(destination, None)
        if not refusing:
            self._refusing.pop(destination, None)
        self.forget()


@dataclass(slots=True)
class Passage:
    """One round's way to the destination."""

    room: int  # for so many messages
    probing: bool = False
    error: str = ""  # for which the circuit is open
    probe: int | None = None  # what the database calls the probe, once it is this round's
    began: float = 0.0
    answered: bool = False
    took: bool = False  # whether the destination took anything
    refusal: str = ""  # the last one, if everything is refused
    pause: timedelta = NO_DELAY  # for which this round opened the circuit
    one_by_one: asyncio.Lock | None = None  # held while no other round may begin

    def let_others_pass(self) -> None:
        lock, self.one_by_one = self.one_by_one, None
        if lock is not None:
            lock.release()


class Breaker:
    """One destination as a relay sees it.

    Closed: everything passes, and nothing is asked but now and then what others found out. A round without any answer
    opens it, and so do unspecific refusals in a row while nothing is taken. When its pause is over one relay of all
    sends one message, and one more if the first has no answer soon; an answer closes it, and then one message may pass,
    two, four, until batches are whole again. While a single message is all that got no answer, it alone pauses.
    """

    def __init__(
        self,
        store: Store,
        circuits: Circuits,
        destination: str | None,
        *,
        batch_size: int,
        lease: timedelta,
        observe: Observer,
        restart_delay: RestartDelay | None = None,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._circuits = circuits
        self._destination = destination
        self._largest = self._room = batch_size
        self._lease = lease
        self._observe = observe
        self._restart_delay = restart_delay
        self._clock = clock
        self._chance = chance
        self._one_by_one = asyncio.Lock()
        self._answered_at = float("-inf")
        self._refused = 0  # unspecific refusals since anything was taken
        self._told_open = False  # whether the last that was observed here is that it opened

    @asynccontextmanager
    async def passage(self) -> AsyncIterator[Passage]:
        """A way for one round: beside others only while whole batches pass, or if they wait long for answers."""
        passage = Passage(self._room)
        if self._room < self._largest:
            await self._one_by_one.acquire()
            passage.one_by_one = self._one_by_one
        try:
            await self._look(passage)
            yield passage
        except BaseException:
            await self._give_up(passage)
            raise
        finally:
            passage.let_others_pass()

    async def _look(self, passage: Passage) -> None:
        passage.room = self._room
        known = self._circuits.known(self._destination)
        if known is not None:
            known = await self._circuits.look(self._destination)
        if known is None and self._told_open and self._circuits.refusing(self._destination) is None:
            self._tell(CircuitClosed(self._destination))  # another relay had an answer
        if known is not None:
            self._room = 1
            passage.room = 0 if self._circuits.remaining(self._destination) else 1
            passage.probing = True
            passage.error = known.error

    async def passes(self, passage: Passage) -> bool:
        """Whether what was claimed may go out: asked when there is something, because all of this costs statements."""
        if passage.probing:
            passage.probe = await self._store.circuits.probe(self._destination, self._probe_lease)
            self._circuits.forget()
        elif await self._circuits.look(self._destination) is not None:
            self._room = 1
            return False
        passage.began = self._clock()
        asyncio.get_running_loop().call_later(LONGEST_TURN, passage.let_others_pass)
        return not passage.probing or passage.probe is not None

    @property
    def _probe_lease(self) -> timedelta:
        """A first probe without an answer soon leaves the way to a second one: it may be the message that is to blame.

        A second one is all that a destination gets which is away.
        """
        known = self._circuits.known(self._destination)
        is_second = known is not None and known.state is CircuitState.PROBING
        return self._lease if is_second else timedelta(seconds=LONGEST_TURN)

    def took(self, passage: Passage) -> None:
        """The destination took a message."""
        self._refused = 0
        passage.took, passage.refusal = True, ""

    def spares(self, passage: Passage, error: str) -> bool:
        """An unspecific refusal came. Whether it is about the destination, and counts against no message."""
        self._refused += 1
        refusing = self._circuits.refusing(self._destination)
        if refusing is not None and refusing >= REFUSED_FOR:
            return False
        if refusing is not None or self._refused >= REFUSALS:
            passage.refusal = error
        return refusing is not None or self._refused > REFUSALS

    async def answered(self, passage: Passage) -> None:
        """The destination said something, be it no."""
        self._answered_at = self._clock()
        if not passage.refusal or (passage.took and not passage.pause):
            await self._close(passage)
        if passage.refusal and not passage.pause:
            error = f"it refuses everything: {passage.refusal}"
            passage.pause = await self._open(passage, error, refusing=True)
        elif not passage.refusal and not passage.answered:
            passage.answered = True
            self._room = min(self._largest, self._room * 2)
        passage.let_others_pass()

    async def _close(self, passage: Passage) -> None:
        circuits, destination = self._circuits, self._destination
        recovered = passage.took and circuits.refusing(destination) is not None
        if passage.probe is not None or circuits.known(destination) is not None or recovered:
            given_up = not passage.took and (circuits.refusing(destination) or 0.0) >= REFUSED_FOR
            if await self._store.circuits.close(destination, refusing=not passage.took) and not given_up:
                self._tell(CircuitClosed(destination))
            circuits.closed(destination, refusing=not passage.took)
        passage.probe = None

    async def failed(self, passage: Passage, error: str, ids: Sequence[str]) -> timedelta:
        """No answer came to anything of a round; for how long a message that was alone in it should not be tried.

        As long as the same message is all that got no answer, it may be what its destination cannot bear, and the
        pause is its own: others need not wait. All relays know it by the error.
        """
        if self._answered_at > passage.began:  # another relay got one: it is there
            return NO_DELAY
        if len(ids) > 1:
            await self._open(passage, error)
            return NO_DELAY
        if passage.probing and ids[0] not in passage.error:
            return await self._open(passage, error)
        return await self._open(passage, f"{error} (message {ids[0]})", holds_back=False)

    async def unused(self, passage: Passage) -> None:
        """Nothing of a round could be sent. If it was to probe, another message does so at once."""
        if passage.probe is not None:
            await self._give_up(passage)
            passage.probe = None
            self._circuits.forget()

    async def _open(
        self, passage: Passage, error: str, *, refusing: bool = False, holds_back: bool = True
    ) -> timedelta:
        pause, probe = self._pause(passage.probe or 0, error), passage.probe
        self._room = 1
        self._circuits.forget()
        until = pause if holds_back else NO_DELAY
        if await self._store.circuits.open(self._destination, until, error, probe=probe, refusing=refusing):
            self._tell(CircuitOpened(self._destination, error, pause))
        passage.probe = None
        await self._circuits.look(self._destination)
        return pause

    def _tell(self, event: CircuitOpened | CircuitClosed) -> None:
        self._told_open = isinstance(event, CircuitOpened)
        self._observe(event)

    def held(self) -> float:
        """Seconds to sleep before another round makes sense; none if there is no reason to."""
        return min(LOOK_EVERY, self._circuits.remaining(self._destination))

    def patience(self, longest: float) -> float:
        """Seconds to wait for something to send. The message of a probe is due a moment after the next one is."""
        return longest if self._circuits.known(self._destination) is None else min(longest, LOOK_EVERY)

    def _pause(self, failures: int, error: str) -> timedelta:
        said = chosen_pause(self._restart_delay, failures + 1, TransportUnavailable(error))
        if said is not None:
            return timedelta(seconds=said)
        growing = min(LONGEST, SHORTEST * 2.0 ** min(failures, 10))
        return timedelta(seconds=growing * (1 + JITTER * (2 * self._chance() - 1)))

    async def _give_up(self, passage: Passage) -> None:
        """Let another relay probe at once; if not even that can be written, the lease of the probe runs out."""
        if passage.probe is not None:
            with suppress(Exception):
                await self._store.circuits.open(self._destination, NO_DELAY, passage.error, probe=passage.probe)
