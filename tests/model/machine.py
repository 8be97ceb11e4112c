"""Machine: everything that clients of a store may do in any order, each step checked against the model."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from outbox import Backlog
from outbox.core.attempt import Outcome
from outbox.core.store import Suspected

from .actions import actions
from .model import Model
from .operations import TIMERS, Operations, crash, difference, pick
from .world import World

MOST_CLIENTS, MOST_ROWS = 5, 16


class StoreMachine(Operations, RuleBasedStateMachine):
    """Several clients of one store."""

    @initialize(keeps=st.booleans(), wants=st.booleans(), count=st.integers(1, 4))
    def start(self, keeps: bool, wants: bool, count: int) -> None:
        """Some messages, of which a worker may hold some already."""
        self._world = World(self._url, self._table_name, keeps=keeps)
        self._model = Model(keeps=keeps)
        self._run(self.world.open())
        self._side_by_side = self.world.store.transactions.writes_side_by_side
        self.begin()
        self._emit(*self._transaction(0), "order.paid", count, later=False, expires=self._routes, timer_id=None)
        if not self._routes:
            self._emit(*self._transaction(0), "order.paid", 1, later=False, expires=False, timer_id=TIMERS[0])
        self._end(0, commit=True)
        self._sight = self._look()
        if self._routes:
            self.bind(0)
            self.route(10, discards=False, wanted={"a": 2} if wants else {}, cut=0)

    def teardown(self) -> None:
        try:
            if self._world is not None:
                self._run(self._tear_down())
        finally:
            self._runner.close()

    async def _tear_down(self) -> None:
        self._check_counts(await self.world.store.inspection.backlog())
        for transaction in self._open.values():
            await self.world.end(transaction, commit=False)
        for client in self._clients:
            crash(client.claim)
        await self.world.close()

    # What must hold after every step.

    @invariant()
    def the_store_is_as_the_model_says(self) -> None:
        if self._world is not None:
            self._sight = self._look()
            assert self._sight.rows == self._model.rows, difference(self._model.rows, self._sight.rows)

    def _check_counts(self, backlog: Backlog) -> None:
        waiting = [row for key, row in self._model.rows.items() if key[1] is None and row.state == "open"]
        assert backlog.waiting == sum(not row.unroutable for row in waiting)
        assert backlog.unroutable == sum(row.unroutable for row in waiting)
        done = [key[1] for key, row in self._model.rows.items() if row.state == "sent"]
        assert (backlog.sent, backlog.handled) == (done.count(None), sum(queue is not None for queue in done))
        rows = self._model.rows.values()
        assert backlog.leased == sum(row.lease is not None for row in rows)
        assert backlog.dead == sum(row.state == "dead" for row in rows)

    # What anybody may do next. One rule with many words: of several, Hypothesis leaves out half in every run.

    @rule(action=actions)
    def step(self, action: dict[str, Any]) -> None:
        name, arguments = action["do"], {key: value for key, value in action.items() if key != "do"}
        if name != "write" and not self._side_by_side:
            while self._open:  # whoever else wants to write waits for its end
                self.end(0, commit=True)
            self._sight = self._look()
        if self._can(name):
            getattr(self, name)(**arguments)

    def _can(self, name: str) -> bool:
        match name:
            case "move":
                return self._routes or self.can_begin()
            case "claim":
                return bool(self._model.rows) and len(self._clients) < MOST_CLIENTS
            case "work":
                return bool(self._clients)
            case "pass_time":
                return bool(self._can_pass())
            case _:
                return True

    def write(
        self,
        what: str,
        which: int,
        routing_key: str,
        count: int,
        flags: tuple[bool, bool, bool],
        timer: str | None,
        doing: str,
    ) -> None:
        """In transactions of the application's."""
        later, expires, rolls_back = flags
        if self.can_begin() and (what == "at once" or not self._open):
            self.emit_at_once(routing_key, count, expires)
        if self.can_begin() and what == "begin":
            self.begin()
        elif self._open and what == "emit" and len(self._model.rows) < MOST_ROWS:
            self.emit(which, routing_key, count, later, expires, timer)
        elif self._open and what == "go on":
            self.go_on(which, timer or TIMERS[0], doing)
        elif self._open and what == "end":
            self.end(which, commit=not (rolls_back and later))

    def move(self, what: str, which: int, limit: int, discards: bool, wanted: dict[str, int], cut: int) -> None:
        """From the outbox to queues; where there are none, timers away."""
        if not self._routes:
            self.cancel(which, commit=discards)
            return
        match what:
            case "bind":
                self.bind(which)
            case "unbind":
                self.unbind(which)
            case "deliver":
                self.deliver(which)
            case _:
                room = MOST_CLIENTS - len(self._clients)
                self.route(limit, discards, wanted if len(wanted) <= room else {}, cut)

    def cancel(self, which: int, *, commit: bool) -> None:
        """Perhaps a timer that somebody holds."""
        leased = [row.timer_id for row in self._model.rows.values() if row.timer_id and row.lease]
        self.begin()
        self.go_on(-1, pick([*leased, *TIMERS], which), "cancel")
        self.end(-1, commit=commit)

    def claim(self, which: int, limit: int, suspected: Suspected, cut: int) -> None:
        self._claim(self._other(which).store, self._queue(which), limit, suspected=suspected, cut=cut)

    def work(self, what: str, which: int, attempt: int, how: list[Outcome], commit: bool, cut: int) -> None:
        """With a claim that somebody holds, or believes to hold."""
        client = pick(self._clients, which)
        id = pick(sorted(client.keys), attempt)
        match what:
            case "settle":
                self.settle(client, dict(zip(sorted(client.held or client.keys), how, strict=False)), cut)
            case "again":
                self.settle(client, {id: how[0]}, 0)
            case "complete":
                self.complete(client, id, commit)
            case "renew":
                self.renew(client)
            case "leave":
                self.leave(client, cut)
            case "crash":
                self.crash(client, forgets=commit)
            case _:
                self.overtake(client, attempt)

    def pass_time(self, which: int, again: int) -> None:
        """Something is over: a delay, a lease or a part of it, an expiration, a retention."""
        can = self._can_pass()
        what = pick(sorted(can), which)
        self._pass_time(pick(can[what], again), what)

    def tend(self, what: str, which: int, limit: int, commit: bool, cut: int) -> None:
        """Dead letters, what is old, and the inbox."""
        if what in ("replay", "discard"):
            self.mend(what, which, limit, cut)
        elif what == "remember":
            self.remember(which, commit, ages=limit > 2)
        else:
            self.clean_up(what, limit, cut)
