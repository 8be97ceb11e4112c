"""Operations: whatever clients do to a store is done to the model too, and both answer the same."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from outbox import Binding, Message, Outbox
from outbox.core.attempt import Done, Outcome, Released
from outbox.core.store import Claim, Selection, Store, Suspected, Wanted
from tests.support.interrupting import interrupted

from .model import LATER, Key, Model, Row, Transaction
from .world import ALL, HOUR, Client, Open, Sight, World

Result = TypeVar("Result")

LEASE = 3 * HOUR  # renewed every hour, hence never by itself
ROUTING_KEYS = ("order.paid", "order.sent", "user.new", "unwanted")
BINDINGS = (("a", "order.*"), ("b", "#"), ("b", "order.paid"), ("c", "user.#"), ("c", "order.sent"))
DISCARDS = {"unwanted": "discard"}
TIMERS = ("first", "second")
OVER: Mapping[str, Mapping[str, timedelta]] = {  # what is over when a time of a row is so far from now
    "delay": {"due_at": -HOUR},
    "lease": {"lease_until": -HOUR},
    "part of lease": {"lease_until": HOUR / 4},
    "expiration": {"expires_at": -HOUR},
    "retention": {"done_at": -2 * HOUR},
}
MOST_TRANSACTIONS = 2


def crash(claim: Claim) -> None:
    """Make a claim stop renewing itself, as if its process had died."""
    claim._renewal.cancel()  # type: ignore[attr-defined]


async def renew(claim: Claim) -> None:
    """What a claim does by itself every third of its lease."""
    await claim._renew_now(claim._held, claim._lease)  # type: ignore[attr-defined]


class Operations:
    """Several clients of one store."""

    _model: Model
    _sight: Sight  # what lay there after the last step
    _side_by_side: bool

    def __init__(self, url: str, table_name: str, *, routes: bool) -> None:
        super().__init__()
        self._routes = routes  # to queues; otherwise a relay publishes
        self._runner = asyncio.Runner()
        self._url = url
        self._table_name = table_name
        self._world: World | None = None
        self._open: dict[int, Open] = {}
        self._clients: list[Client] = []
        self._numbers = 0
        self._messages = 0

    @property
    def world(self) -> World:
        assert self._world is not None
        return self._world

    # Transactions of whoever emits.

    def can_begin(self) -> bool:
        return len(self._open) < (MOST_TRANSACTIONS if self._side_by_side else 1)

    def begin(self) -> None:
        self._numbers += 1
        self._open[self._numbers] = self._run(self.world.begin(self._numbers))
        self._model.transactions[self._numbers] = Transaction()

    def emit(self, which: int, routing_key: str, count: int, later: bool, expires: bool, timer: str | None) -> None:
        number, transaction = self._transaction(which)
        if timer is not None and self._is_touched(number, timer):
            timer = None
        self._emit(number, transaction, routing_key, 1 if timer else count, later, expires, timer)

    def _emit(
        self,
        number: int,
        transaction: Open,
        routing_key: str,
        count: int,
        later: bool,
        expires: bool,
        timer_id: str | None,
    ) -> None:
        changes = self._model.transactions[number]
        options: dict[str, Any] = {"eta": HOUR if later else None, "expiration": HOUR if expires else None}
        bodies: list[Any] = [self._body() for _ in range(count)]
        if count > 1:
            emitted = self._run(transaction.outbox.emit_many(transaction.session, routing_key, bodies, **options))
            assert len(emitted) == count
        else:
            options |= {"timer_id": timer_id, "headers": {"n": str(self._messages)}, "key": "k"}
            message = self._run(transaction.outbox.emit(transaction.session, routing_key, bodies[0], **options))
            emitted = [] if message is None else [message]
        expected = Row(
            message=emitted[0] if emitted else Message(routing_key=routing_key, body=bodies[0]),
            is_due=not later,
            expiration=LATER if expires else None,
            timer_id=timer_id,
        )
        stored = [
            self._model.store(changes, replace(expected, message=message)) for message in emitted or [expected.message]
        ]
        assert bool(emitted) == all(stored)

    def go_on(self, which: int, timer_id: str, what: str) -> None:
        """Cancel a timer, or set, release or roll back a savepoint."""
        number, transaction = self._transaction(which)
        changes = self._model.transactions[number]
        if what == "cancel":
            if self._is_touched(number, timer_id):
                return
            cancelled = self._run(transaction.outbox.cancel_timer(transaction.session, timer_id))
            assert cancelled == self._model.cancel_timer(changes, timer_id)
        elif what in ("keep", "undo") and transaction.savepoints:
            savepoint = transaction.savepoints.pop()
            self._run(savepoint.commit() if what == "keep" else savepoint.rollback())
            self._model.end_savepoint(changes, keep=what == "keep")
        elif len(transaction.savepoints) < 2:
            transaction.savepoints.append(self._run(self._savepoint(transaction)))
            self._model.savepoint(changes)

    async def _savepoint(self, transaction: Open) -> Any:
        return await transaction.session.begin_nested()

    def end(self, which: int, commit: bool) -> None:
        self._end(which, commit=commit)

    def emit_at_once(self, routing_key: str, count: int, expires: bool) -> None:
        self.begin()
        self._emit(*self._transaction(-1), routing_key, count, later=False, expires=expires, timer_id=None)
        self._end(-1, commit=True)

    def _end(self, which: int, *, commit: bool) -> None:
        number, transaction = self._transaction(which)
        del self._open[number]
        self._run(self.world.end(transaction, commit=commit))
        self._model.end(number, commit=commit)

    def _transaction(self, which: int) -> tuple[int, Open]:
        number = pick(list(self._open), which)
        return number, self._open[number]

    def _is_touched(self, number: int, timer_id: str) -> bool:
        """Whether another transaction would have to end first."""
        others = (each for other, each in self._model.transactions.items() if other != number)
        return any(timer_id in each.timer_ids for each in others)

    def _body(self) -> dict[str, int]:
        self._messages += 1
        return {"n": self._messages}

    # Routing.

    def bind(self, which: int) -> None:
        queue, pattern = pick(BINDINGS, which)
        self._run(self.world.store.queues.bind([Binding(queue, pattern)]))
        self._model.bind(queue, pattern)
        assert {(each.queue, each.binding_key) for each in self._run(self.world.store.queues.bindings())} == (
            self._model.bindings
        )

    def unbind(self, which: int) -> None:
        queue, _ = pick(BINDINGS, which)
        assert self._run(self._other(which).store.queues.unbind(queue)) == self._model.unbind(queue)

    def route(self, limit: int, discards: bool, wanted: Mapping[str, int], cut: int) -> None:
        """What a worker beside the router wants comes with a claim on it."""
        unwanted = DISCARDS if discards else {}
        order = self._sight.order
        keys = sorted(self._model.due(None), key=order.__getitem__)[:limit]
        copies = [(id, queue) for id, _ in keys for queue in self._model.queues(self._routing_key(id))]
        happened = self._model.copy()
        happened.route(keys, unwanted)
        store = self._other(limit).store
        wants = {queue: Wanted(count, LEASE) for queue, count in wanted.items()}
        routing = self._cut(store.queues.route(limit, unwanted, wants), cut)
        claims = {} if routing is None else routing.claims
        if routing is not None:
            assert routing.taken == len(keys)
            assert sum(routing.routed.values()) == len(copies)
        self._put_off(keys, happened)
        seen = self._look().rows
        for queue, count in wanted.items():
            # The claim takes what is oldest in the queue, which need not be what was just routed.
            there = [key for key in happened.due(queue) if not happened.rows[key].crashes and key in seen]
            taken = [key for key in there if seen[key].lease or seen[key].state == "dead"]
            if routing is not None and len(wanted) == 1:
                assert taken or not any(key[1] == queue for key in copies)
            assert len(taken) <= count
            self._hand_over(happened, store, queue, taken, claims.get(queue))
        self._decide(happened, certain=routing is not None)

    def _routing_key(self, message_id: str) -> str:
        return self._model.rows[message_id, None].message.routing_key

    def _put_off(self, keys: Sequence[Key], happened: Model) -> None:
        """What no binding matched is looked at again in a second; here it is in an hour."""
        for key, (due_at, row_id) in self._look().order.items():
            if key in keys and happened.rows.get(key) and due_at > self._sight.order[key][0]:
                self._run(self.world.turn_clock(row_id, due_at=HOUR))

    def _hand_over(self, happened: Model, store: Store, queue: str, taken: list[Key], claim: Any) -> None:
        """What had expired is dead, everything else is in the claim; without one nothing is leased."""
        self._numbers += 1
        happened.claim(self._numbers, taken)
        held = [key for key in taken if happened.holds(self._numbers, key)]
        got: dict[int, Key] = {attempt.id: (attempt.message.id, queue) for attempt in claim.attempts} if claim else {}
        assert sorted(got.values()) == sorted(held)
        if claim is not None:
            assert {each.crash_count for each in claim.attempts} == {0}
            self._run(claim.__aenter__())
            self._clients.append(Client(self._numbers, store, claim, claim, queue, got, set(got)))

    def deliver(self, which: int) -> None:
        queues = sorted({queue for queue, _ in BINDINGS})[: which % 3 + 1]
        message = Message(routing_key="straight", body=str(self._body()).encode())
        self._run(self._other(which).store.queues.deliver([message], {message.id: queues}))
        self._model.rows |= {(message.id, queue): Row(message=message) for queue in queues}

    # Claiming.

    def _claim(self, store: Store, queue: str | None, limit: int, *, suspected: Suspected, cut: int) -> None:
        self._numbers += 1
        entering = store.feed.claim(Selection(limit=limit, lease=LEASE, destination=queue, suspected=suspected))
        claim = self._cut(entering.__aenter__(), cut)
        got: dict[int, Key] = {attempt.id: (attempt.message.id, queue) for attempt in claim.attempts} if claim else {}
        taken = self._taken(queue, limit, suspected)
        happened = self._model.copy()
        happened.claim(self._numbers, taken)
        if claim is None:  # what had expired may be dead, everything else was given back
            happened.settle(self._numbers, {key: Released() for key in taken if happened.holds(self._numbers, key)})
            self._decide(happened, certain=False)
            return
        assert list(got.values()) == [key for key in taken if happened.holds(self._numbers, key)]
        for attempt in claim.attempts:
            row = self._model.rows[attempt.message.id, queue]
            assert (attempt.attempt_count, attempt.crash_count) == (row.attempts + 1, row.crashes)
            assert replace(attempt.message, expires_at=None) == row.message
        self._decide(happened, certain=True)
        if got:
            self._clients.append(Client(self._numbers, store, entering, claim, queue, got, set(got)))
        else:
            self._run(entering.__aexit__(None, None, None))

    def _queue(self, which: int) -> str | None:
        """One with something in it, if there is any."""
        if not self._routes:
            return None
        queues = {key[1] for key in self._model.rows if key[1]} or {"a"}
        return pick(sorted({queue for queue in queues if self._model.due(queue)} or queues), which)

    def _taken(self, queue: str | None, limit: int, suspected: Suspected) -> list[Key]:
        """The oldest that are due, with as many suspected ones among them as are wanted."""
        due = sorted(self._model.due(queue), key=self._sight.order.__getitem__)
        if suspected is Suspected.NONE:
            due = [key for key in due if not self._model.rows[key].crashes]
        found = due[:limit]
        if suspected is Suspected.ALL:
            return found
        first = next((key for key in found if self._model.rows[key].crashes), None)
        return [key for key in found if key == first or not self._model.rows[key].crashes]

    def settle(self, client: Client, by_id: Mapping[int, Outcome], cut: int) -> None:
        """Perhaps what was settled before, or is not this client's any more."""
        by_key = {client.keys[id]: outcome for id, outcome in by_id.items()}
        happened = self._model.copy()
        expected = happened.settle(client.number, by_key)
        lost = self._cut(client.claim.settle(by_id), cut)
        if lost is not None:
            assert {client.keys[id] for id in lost} == expected
            client.held -= by_id.keys()
        self._decide(happened, certain=lost is not None)
        if lost is None:
            client.held -= {id for id in by_id if not self._model.holds(client.number, client.keys[id])}

    def complete(self, client: Client, id: int, commit: bool) -> None:
        """In the listener's transaction, with a message that the listener emits."""
        key = client.keys[id]
        held = self._model.holds(client.number, key)
        follow_up = self._run(self._complete(client, id, held=held, commit=commit))
        if held and commit:
            self._model.settle(client.number, {key: Done()})
            self._model.rows[follow_up.id, None] = Row(message=follow_up)
            assert self._run(client.claim.settle({id: Done(in_transaction=True)})) == frozenset()
            client.held.discard(id)

    async def _complete(self, client: Client, id: int, *, held: bool, commit: bool) -> Message:
        outbox = next(each for each in self.world.outboxes if each.store is client.store)
        entering = outbox.transaction()
        session = await entering.__aenter__()
        follow_up = await outbox.emit(session, "order.sent", self._body())
        assert follow_up is not None
        connection = await session.connection()
        written = await connection.run_sync(client.store.writing.write, *client.claim.completion(client.attempt(id)))
        assert written == held
        await self.world.end(Open(outbox, entering, session), commit=held and commit)
        return follow_up

    def renew(self, client: Client) -> None:
        self._run(renew(client.claim))
        self._model.renew(client.number, [client.keys[id] for id in client.held])

    def leave(self, client: Client, cut: int) -> None:
        """Close a claim: what was not settled is given back, whatever happens to whoever waits for it."""
        self._clients.remove(client)
        self._cut(client.entering.__aexit__(None, None, None), cut)
        held = [client.keys[id] for id in client.held]
        self._model.settle(client.number, {key: Released() for key in held if self._model.holds(client.number, key)})

    def crash(self, client: Client, *, forgets: bool) -> None:
        """A process that dies, or one that freezes and comes back with its old token."""
        crash(client.claim)
        if forgets:
            self._clients.remove(client)

    def overtake(self, client: Client, count: int) -> None:
        """Leases run out while their holder sleeps, and somebody else claims what it held."""
        for id in sorted(client.held)[: count + 1]:
            if self._model.holds(client.number, client.keys[id]):
                self._pass_time(client.keys[id], "lease")
        self._sight = self._look()
        self._claim(self._other(count).store, client.queue, 10, suspected=Suspected.ALL, cut=0)

    # Time.

    def _pass_time(self, key: Key, what: str) -> None:
        self._run(self.world.turn_clock(self._sight.row_ids[key], **OVER[what]))
        self._model.pass_time(key, what)

    def _can_pass(self) -> dict[str, list[Key]]:
        return {what: keys for what in OVER if (keys := self._model.can_pass(what))}

    # Dead letters and cleaning up.

    def mend(self, what: str, which: int, count: int, cut: int) -> None:
        """Replay or discard dead letters; one that is not there is passed over."""
        keys = [key for key, row in self._model.rows.items() if row.state == "dead"][:count]
        ids = [*(self._sight.row_ids[key] for key in keys), ALL]
        happened = self._model.copy()
        letters = self._other(which).store.dead_letters
        if what == "replay":
            happened.replay(keys)
            answer = self._cut(letters.replay(ids), cut)
        else:
            happened.remove(keys)
            answer = self._cut(letters.discard(ids), cut)
        assert answer in (None, len(keys))
        self._decide(happened, certain=answer is not None)

    def clean_up(self, what: str, limit: int, cut: int) -> None:
        """Only what has expired dies, only what was done long ago goes."""
        store = self._other(limit).store
        if what == "expire":
            can = self._model.expirable()
            count = self._cut(store.maintenance.expire(limit), cut)
        else:
            can = [key for key, row in self._model.rows.items() if row.is_old]
            count = self._cut(store.maintenance.purge(HOUR, limit), cut)
        seen = self._look().rows
        gone = [key for key in can if key not in seen or seen[key].state != self._model.rows[key].state]
        expected = min(limit, len(can))
        assert count in (None, expected)
        assert len(gone) == expected or (count is None and not gone)
        (self._model.expire if what == "expire" else self._model.remove)(gone)

    def remember(self, which: int, commit: bool, ages: bool) -> None:
        """The inbox takes a message once, and forgets what rolled back and what is old."""
        entry = (pick(("a", "b"), which), "a message")
        new = entry not in self._model.inbox
        assert self._run(self._remember(*entry, commit=commit)) == new
        if commit:
            self._model.inbox.add(entry)
        if ages:
            self._run(self.world.age_inbox())
            assert self._run(self.world.store.inbox.purge(HOUR, ALL)) == len(self._model.inbox)
            self._model.inbox.clear()
        else:
            assert self._run(self.world.store.inbox.purge(HOUR, ALL)) == 0

    async def _remember(self, queue: str, message_id: str, *, commit: bool) -> bool:
        transaction = await self.world.begin(0)
        connection = await transaction.session.connection()
        entry = self.world.store.inbox.remember(queue, message_id)
        written = await connection.run_sync(self.world.store.writing.write, *entry)
        await self.world.end(transaction, commit=commit)
        return bool(written)

    # Steps.

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._runner.run(work)

    def _cut(self, work: Coroutine[Any, Any, Result], at: int) -> Result | None:
        """What an operation answers; none if it was cancelled where it waited for the n-th time."""
        return self._run(self._interrupted(work, at))

    async def _interrupted(self, work: Coroutine[Any, Any, Result], at: int) -> Result | None:
        if not at:
            return await work
        interruption = await interrupted(work, at)
        return interruption.result

    def _decide(self, happened: Model, *, certain: bool) -> None:
        """What was cancelled happened to a message or it did not; the store tells which."""
        if certain:
            self._model.rows = happened.rows
        else:
            self._model.agree(happened, self._look().rows)

    def _look(self) -> Sight:
        return self._run(self.world.look())

    def _other(self, which: int) -> Outbox:
        return self.world.outboxes[which % 2]


Item = TypeVar("Item")


def pick(items: Sequence[Item], which: int) -> Item:
    return items[which % len(items)]


def difference(expected: dict[Key, Row], seen: Any) -> str:
    """Only the rows that differ."""
    keys = [key for key in {**expected, **seen} if expected.get(key) != seen.get(key)]
    return "\n".join(f"{key}: expected {expected.get(key)}, saw {seen.get(key)}" for key in keys)
