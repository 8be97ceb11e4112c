"""The checker sees what is wrong, exactly that, and nothing where nothing is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import pytest

from tests.chaos.checker import Kind, check, digest
from tests.chaos.evidence import Asked, Balance, Buried, Change, Effect, FinalTables
from tests.chaos.history import (
    COMMITTED,
    ROLLED_BACK,
    UNKNOWN,
    UNTOLD,
    Ending,
    History,
    Run,
    Struck,
    Transaction,
)
from tests.chaos.specimens import emitted

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def change(by: str | None, second: float, deleted: bool, row: int, *about: object) -> Change:
    return Change(by, at(second), at(second + 0.1), deleted, row, *about)  # type: ignore[arg-type]


@dataclass
class World:
    """A run in which everything went well, until a test spoils it."""

    transactions: dict[str, Transaction]
    runs: list[Run]
    faults: list[Struck]
    endings: list[Ending]
    orders: set[str]
    effects: list[Effect]
    letters: dict[str, Buried]
    changes: list[Change]
    balances: dict[tuple[str, str], int]  # of books and accounts
    asked: list[Asked]
    waiting: list[tuple[str, str]] = field(default_factory=list)
    own_commits: set[tuple[str, str]] = field(default_factory=set)
    children: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    commits: list[str] = field(default_factory=list)
    delivered: list[str] = field(default_factory=list)
    open_sessions: int = 0
    at_least_once: bool = False
    calm_since: float = 21.0

    def violations(self) -> list[tuple[Kind, str]]:
        history = History(
            list(self.transactions.values()),
            self.runs,
            self.faults,
            self.endings,
            self.calm_since,
            self.own_commits,
            self.children,
            self.ended,
        )
        tables = FinalTables(
            frozenset(self.orders),
            tuple(self.effects),
            tuple(self.waiting),
            tuple(self.letters.values()),
            tuple(self.changes),
            self.open_sessions,
            self.at_least_once,
            tuple(Balance(book, account, balance) for (book, account), balance in self.balances.items()),
            tuple(self.asked),
            commits=tuple(self.commits),
            delivered=tuple(self.delivered),
        )
        return [(violation.kind, violation.what) for violation in check(history, tables)]

    def effect(self, id: str, queue: str = "invoices") -> Effect:
        return next(each for each in self.effects if (each.message_id, each.queue) == (id, queue))

    def change_effect(self, id: str, **changes: object) -> None:
        before = self.effect(id)
        self.effects[self.effects.index(before)] = replace(before, **changes)  # type: ignore[arg-type]

    def change_letter(self, id: str, **changes: object) -> None:
        self.letters[id] = replace(self.letters[id], **changes)  # type: ignore[arg-type]

    def change_row(self, position: int, **changes: object) -> None:
        self.changes[position] = replace(self.changes[position], **changes)  # type: ignore[arg-type]


def good_world() -> World:
    """Two queues, retries, all kinds of dead letters, a rollback, lost answers, replies, a lease that changed hands."""
    messages = {
        "plain": emitted("plain"),
        "shared": emitted("shared", routing_key="order.shared"),
        "retried": emitted("retried", "fails twice"),
        "hopeless": emitted("hopeless", "fails always"),
        "rejected": emitted("rejected", "is rejected"),
        "broken": emitted("broken", "is no JSON"),
        "poison": emitted("poison", "kills always", "poison.pill"),
        "careless": emitted("careless", "swallows an error once"),
        "relaxed": emitted("relaxed", "closes its session and goes on"),
        "incurable": emitted("incurable", "sends COMMIT always"),
        "driver": emitted("driver", "commits by its driver", "driver.commits"),
        "child": emitted("child"),
    }
    reply, undone = (emitted(id, routing_key="reply.shipped") for id in ("reply", "undone reply"))
    return World(
        transactions={
            "committed": Transaction("committed", tuple(messages.values()), ("in a savepoint",), COMMITTED),
            "rolled back": Transaction("rolled back", (emitted("never"),), (), ROLLED_BACK),
            "in doubt, there": Transaction("in doubt, there", (emitted("late"),), (), UNKNOWN),
            "in doubt, not there": Transaction("in doubt, not there", (emitted("gone"),), (), UNKNOWN),
            "listener": Transaction("listener", (reply,), (), UNTOLD),
            "listener that failed": Transaction("listener that failed", (undone,), (), UNTOLD),
        },
        runs=[
            *(Run(id, "invoices", 1) for id in ("plain", "shared", "late")),
            Run("shared", "ledger", 1),
            Run("reply", "confirmations", 1),
            *(Run(id, "invoices", attempt) for id in ("retried", "hopeless") for attempt in (1, 2, 3)),
            *(Run("hopeless", "invoices", attempt, failed=True) for attempt in (1, 2, 3)),
            Run("rejected", "invoices", 1),
            *(Run("poison", "poison", 1) for _ in range(3)),
            *(Run("careless", "invoices", attempt) for attempt in (1, 2)),
            *(Run("incurable", "invoices", attempt) for attempt in (1, 2, 3)),
            *(Run("driver", queue, 1) for queue in ("drivers", "plain-drivers")),
            *(Run(id, "invoices", 1) for id in ("relaxed", "child")),
        ],
        faults=[Struck("cut", "worker-0", 10.0, 11.0), Struck("kill a worker", "worker-0", 20.0, 20.0)],
        endings=[
            Ending("worker-0.1", -9, started=True, told=True),
            Ending("worker-0.2", 4, started=False, told=False),
            Ending("worker-0.3", 0, started=True, told=True, seconds=3.0),
        ],
        orders={"committed", "in doubt, there", "listener"},
        effects=[
            *(Effect(id, "invoices", 1, digest(messages[id]), 5.0) for id in ("plain", "shared")),
            Effect("shared", "ledger", 1, digest(messages["shared"]), 12.0),
            Effect("reply", "confirmations", 1, digest(reply), 13.0),
            Effect("late", "invoices", 1, digest(emitted("late")), 22.0),
            Effect("retried", "invoices", 3, digest(messages["retried"]), 22.0),
            Effect("careless", "invoices", 2, digest(messages["careless"]), 5.0),
            *(Effect(id, "invoices", 1, digest(messages[id]), 5.0) for id in ("relaxed", "child")),
            *(Effect("driver", queue, 1, digest(messages["driver"]), 5.0) for queue in ("drivers", "plain-drivers")),
        ],
        letters={
            "hopeless": Buried(
                messages["hopeless"],
                "invoices",
                "exhausted",
                attempts=3,
                crashes=0,
                history="attempt 1 failed: PlannedFailure: …\nattempt 2 failed: PlannedFailure: …\n"
                "attempt 3 was the last, exhausted: PlannedFailure: …\n",
            ),
            "rejected": Buried(
                messages["rejected"], "invoices", "rejected", 1, 0, "attempt 1 was the last, rejected: Reject: …\n"
            ),
            "broken": Buried(
                messages["broken"], "invoices", "undecodable", 1, 0, "attempt 1 was the last, undecodable: …\n"
            ),
            "poison": Buried(messages["poison"], "poison", "crashed", 0, 4),  # one worker died while it buried it
            "incurable": Buried(
                messages["incurable"],
                "invoices",
                "exhausted",
                attempts=3,
                crashes=0,
                history="attempt 1 failed: TransactionError: …\nattempt 2 failed: OperationalError: …\n"
                "attempt 3 was the last, exhausted: TransactionError: …\n",
            ),
            **{
                queue: Buried(
                    messages["driver"],
                    queue,
                    "rejected",
                    1,
                    0,
                    "attempt 1 was the last, rejected: TransactionError: …\n",
                )
                for queue in ("drivers", "plain-drivers")
            },
        },
        changes=[
            change(None, 0, False, 1, "plain", "", None, None, None),  # routed
            change("worker-0.1", 1, False, 1, "plain", "invoices", None, None, "a"),  # claimed
            change("worker-0.1", 2, False, 1, "plain", "invoices", "a", at(3), "a"),  # renewed
            change("worker-1.1", 5, False, 1, "plain", "invoices", "a", at(4), "b"),  # taken over
            change("worker-1.1", 6, True, 1, "plain", "invoices", "b", at(7), None),  # done
            *(
                sent
                for row, (id, attempts) in enumerate({"late": 1, "retried": 1, "poison": 0, "shared": 0}.items(), 2)
                for sent in (
                    change("relay-0.1", 60, False, row, id, "", None, None, id),  # claimed
                    change("relay-0.1", 61, True, row, id, "", id, at(65), None, attempts),  # taken over HTTP
                )
            ),
        ],
        balances={
            (book, account): balance
            for book in ("ordered", "shipped", "confirmed")
            for account, balance in (("rich", 700), ("poor", 0))
        },
        asked=[
            Asked("relay-0.1", "late", 1.0, 2.0, 503),
            Asked("relay-0.1", "plain", 1.0, 3.0, 202),
            Asked("relay-0.1", "retried", 2.0, 4.0, None),  # the one before was answered meanwhile
            Asked("relay-0.1", "poison", 5.0, 6.0, None),  # and after that nobody was, for longer than a batch lasts
            Asked("relay-1.1", "late", 22.0, 22.1, 202),
            *(Asked("relay-0.1", id, 60.0, 61.0, 202) for id in ("retried", "poison")),
        ],
        commits=["committed", "in doubt, there"],
        delivered=["hopeless", "rejected"],
        own_commits={("driver", "drivers"), ("driver", "plain-drivers")},
        children={"child that committed", "child that was refused"},
        ended={"child that committed", "child that was refused"},
    )


def test_a_good_world_has_no_violation() -> None:
    assert good_world().violations() == []


Spoil = Callable[[World], object]

BAD: Mapping[str, tuple[Spoil, Kind, str]] = {
    "a committed message left no trace": (
        lambda world: world.effects.remove(world.effect("plain")),
        Kind.LOST,
        "plain",
    ),
    "a message overtook one that was committed before": (
        lambda world: world.delivered.reverse(),
        Kind.OVERTAKEN,
        "hopeless",
    ),
    "a message reached one of its two queues": (
        lambda world: world.effects.remove(world.effect("shared", "ledger")),
        Kind.LOST,
        "shared",
    ),
    "a dead letter vanished": (lambda world: world.letters.pop("hopeless"), Kind.LOST, "hopeless"),
    "a message in doubt was committed and left no trace": (
        lambda world: world.effects.remove(world.effect("late")),
        Kind.LOST,
        "late",
    ),
    "a message still waits in its queue": (
        lambda world: (world.effects.remove(world.effect("plain")), world.waiting.append(("plain", "invoices"))),
        Kind.STUCK,
        "plain",
    ),
    "a message was never routed": (
        lambda world: (world.effects.remove(world.effect("plain")), world.waiting.append(("plain", ""))),
        Kind.STUCK,
        "plain",
    ),
    "a rolled back message had an effect": (
        lambda world: world.effects.append(Effect("never", "invoices", 1, "")),
        Kind.PHANTOM,
        "never",
    ),
    "a message of a savepoint that was rolled back had an effect": (
        lambda world: world.effects.append(Effect("in a savepoint", "invoices", 1, "")),
        Kind.PHANTOM,
        "in a savepoint",
    ),
    "a message in doubt was not committed and is a dead letter": (
        lambda world: world.letters.update(gone=Buried(emitted("gone"), "invoices", "exhausted", 3, 0)),
        Kind.PHANTOM,
        "gone",
    ),
    "a message that nobody emitted waits": (
        lambda world: world.waiting.append(("from nowhere", "invoices")),
        Kind.PHANTOM,
        "from nowhere",
    ),
    "a message came to a queue that is not bound to it": (
        lambda world: world.effects.append(replace(world.effect("plain"), queue="ledger")),
        Kind.MISROUTED,
        "plain",
    ),
    "a message had two effects": (
        lambda world: world.effects.append(world.effect("plain")),
        Kind.REPEATED,
        "plain",
    ),
    "a dead letter was buried twice": (
        lambda world: world.letters.update(again=world.letters["rejected"]),
        Kind.REPEATED,
        "rejected",
    ),
    "a producer was told of a commit that is not there": (
        lambda world: world.transactions.update(empty=Transaction("empty", (), (), COMMITTED)),
        Kind.TORN,
        "empty",
    ),
    "a producer was told of a rollback that committed": (
        lambda world: (
            world.transactions.update(empty=Transaction("empty", (), (), ROLLED_BACK)),
            world.orders.add("empty"),
        ),
        Kind.TORN,
        "empty",
    ),
    "a listener saw another body": (
        lambda world: world.change_effect("plain", digest="something else"),
        Kind.ALTERED,
        "plain",
    ),
    "a dead letter has another body": (
        lambda world: world.change_letter("rejected", message=replace(emitted("rejected"), body=b"{}")),
        Kind.ALTERED,
        "rejected",
    ),
    "a dead letter lost a header": (
        lambda world: world.change_letter("hopeless", message=replace(world.letters["hopeless"].message, headers={})),
        Kind.ALTERED,
        "hopeless",
    ),
    "a dead letter has another routing key": (
        lambda world: world.change_letter(
            "broken", message=replace(world.letters["broken"].message, routing_key="order.shared")
        ),
        Kind.ALTERED,
        "broken",
    ),
    "a good message was buried": (
        lambda world: (
            world.effects.remove(world.effect("plain")),
            world.letters.update(plain=Buried(emitted("plain"), "invoices", "exhausted", 3, 0)),
        ),
        Kind.DEAD,
        "plain",
    ),
    "a message that always fails had an effect": (
        lambda world: (
            world.letters.pop("hopeless"),
            world.effects.append(Effect("hopeless", "invoices", 3, digest(emitted("hopeless", "fails always")))),
        ),
        Kind.ALIVE,
        "hopeless",
    ),
    "a dead letter has a wrong reason": (
        lambda world: world.change_letter("rejected", reason="exhausted"),
        Kind.REASON,
        "rejected",
    ),
    "an attempt that failed kept its effect": (
        lambda world: world.change_effect("retried", attempt=2),
        Kind.SWALLOWED,
        "retried",
    ),
    "an attempt was counted that nobody made": (
        lambda world: world.runs.remove(Run("retried", "invoices", 2)),
        Kind.UNTRIED,
        "retried",
    ),
    "a message was given up too early": (
        lambda world: world.change_letter(
            "hopeless",
            attempts=2,
            history="attempt 1 failed: PlannedFailure: …\nattempt 2 was the last, exhausted: PlannedFailure: …\n",
        ),
        Kind.RETRIES,
        "hopeless",
    ),
    "a message was tried once too often": (
        lambda world: world.change_letter(
            "hopeless",
            attempts=4,
            history=world.letters["hopeless"].history.replace("was the last, exhausted", "failed")
            + "attempt 4 was the last, exhausted: PlannedFailure: …\n",
        ),
        Kind.RETRIES,
        "hopeless",
    ),
    "an attempt is missing in the history": (
        lambda world: world.change_letter("hopeless", attempts=4),
        Kind.RETRIES,
        "hopeless",
    ),
    "a poisonous message killed a fourth worker": (
        lambda world: world.runs.append(Run("poison", "poison", 1)),
        Kind.CRASHES,
        "poison",
    ),
    "a poisonous message was buried too early": (
        lambda world: world.change_letter("poison", crashes=2),
        Kind.CRASHES,
        "poison",
    ),
    "a lease was taken before it ended": (
        lambda world: world.change_row(3, old_until=at(5.5)),
        Kind.STOLEN,
        "plain",
    ),
    "a message was settled under a lease that had ended": (
        lambda world: world.change_row(4, old_until=at(6)),
        Kind.LATE,
        "plain",
    ),
    "a lease that had ended was renewed": (
        lambda world: world.change_row(2, old_until=at(1.5)),
        Kind.LATE,
        "plain",
    ),
    "a message was settled by a process that had lost it": (
        lambda world: world.change_row(4, application="worker-0.1"),
        Kind.FOREIGN,
        "plain",
    ),
    "a message was removed from its queue by somebody without a lease": (
        lambda world: world.change_row(4, old_token=None, old_until=None),
        Kind.UNHELD,
        "plain",
    ),
    "nothing was done after the last fault": (
        lambda world: [world.change_effect(id, at=20.0) for id in ("late", "retried")],
        Kind.IDLE,
        "everybody",
    ),
    "work took too long to resume": (
        lambda world: (world.change_effect("late", at=60.0), world.change_effect("retried", at=60.0)),
        Kind.IDLE,
        "everybody",
    ),
    "a worker ended by itself": (
        lambda world: world.endings.append(Ending("worker-1.1", 1, started=True, told=False)),
        Kind.DESERTED,
        "worker-1.1",
    ),
    "a relay did not stop": (
        lambda world: world.endings.append(Ending("relay-0.1", -9, started=True, told=True, seconds=90.0)),
        Kind.HUNG,
        "relay-0.1",
    ),
    "a reply left no trace": (
        lambda world: world.effects.remove(world.effect("reply", "confirmations")),
        Kind.LOST,
        "reply",
    ),
    "a reply had two effects": (
        lambda world: world.effects.append(world.effect("reply", "confirmations")),
        Kind.REPEATED,
        "reply",
    ),
    "a reply came from a listener whose transaction was rolled back": (
        lambda world: world.effects.append(Effect("undone reply", "confirmations", 1, "")),
        Kind.PHANTOM,
        "undone reply",
    ),
    "a reply of a listener whose transaction was rolled back waits": (
        lambda world: world.waiting.append(("undone reply", "confirmations")),
        Kind.PHANTOM,
        "undone reply",
    ),
    "a reply went back to the service that sent it": (
        lambda world: world.effects.append(Effect("reply", "invoices", 1, "")),
        Kind.MISROUTED,
        "reply",
    ),
    "an attempt was counted that was never made": (
        lambda world: world.change_row(-1, attempts=1),
        Kind.BURNT,
        "shared",
    ),
    "an attempt was counted while nobody was answered": (
        lambda world: world.change_row(-3, attempts=1),
        Kind.BURNT,
        "poison",
    ),
    "more attempts were counted than were refused": (
        lambda world: world.change_row(-7, attempts=2),
        Kind.BURNT,
        "late",
    ),
    "nothing was taken over HTTP after the last fault": (
        lambda world: world.asked.remove(Asked("relay-1.1", "late", 22.0, 22.1, 202)),
        Kind.IDLE,
        "relays",
    ),
    "an error was swallowed, and its message counted as handled": (
        lambda world: world.effects.remove(world.effect("careless")),
        Kind.LOST,
        "careless",
    ),
    "an attempt that swallowed an error kept its effect": (
        lambda world: world.change_effect("careless", attempt=1),
        Kind.SWALLOWED,
        "careless",
    ),
    "a listener that closed its session and went on left no effect": (
        lambda world: world.effects.remove(world.effect("relaxed")),
        Kind.LOST,
        "relaxed",
    ),
    "a listener that closed its session and went on had its effect twice": (
        lambda world: world.effects.append(world.effect("relaxed")),
        Kind.REPEATED,
        "relaxed",
    ),
    "a message whose session was always closed was never a dead letter": (
        lambda world: (world.letters.pop("incurable"), world.waiting.append(("incurable", "invoices"))),
        Kind.STUCK,
        "incurable",
    ),
    "a message whose listener always sends COMMIT had an effect": (
        lambda world: (
            world.letters.pop("incurable"),
            world.effects.append(
                Effect("incurable", "invoices", 1, digest(emitted("incurable", "sends COMMIT always")))
            ),
        ),
        Kind.ALIVE,
        "incurable",
    ),
    "a mistake was tried once too often": (
        lambda world: world.change_letter(
            "incurable",
            attempts=4,
            history=world.letters["incurable"].history.replace("was the last, exhausted", "failed")
            + "attempt 4 was the last, exhausted: TransactionError: …\n",
        ),
        Kind.RETRIES,
        "incurable",
    ),
    "what was committed by its driver left no trace": (
        lambda world: (world.letters.pop("drivers"), world.effects.remove(world.effect("driver", "drivers"))),
        Kind.LOST,
        "driver",
    ),
    "what was committed by its driver had two effects": (
        lambda world: world.effects.append(world.effect("driver", "drivers")),
        Kind.REPEATED,
        "driver",
    ),
    "what was committed by its driver counted as done": (
        lambda world: world.letters.pop("plain-drivers"),
        Kind.ALIVE,
        "driver",
    ),
    "what was committed by its driver was tried again": (
        lambda world: world.runs.append(Run("driver", "drivers", 2)),
        Kind.AGAIN,
        "driver",
    ),
    "what was committed by its driver was given up for another reason": (
        lambda world: world.change_letter("drivers", reason="exhausted"),
        Kind.REASON,
        "driver",
    ),
    "a child's message left no trace": (
        lambda world: world.effects.remove(world.effect("child")),
        Kind.LOST,
        "child",
    ),
    "a child never ended": (
        lambda world: world.ended.remove("child that was refused"),
        Kind.HUNG,
        "child that was refused",
    ),
    "one service counted an amount twice": (
        lambda world: world.balances.update({("shipped", "rich"): 800}),
        Kind.UNBALANCED,
        "rich",
    ),
    "one service did not count an amount": (
        lambda world: world.balances.update({("confirmed", "rich"): 600}),
        Kind.UNBALANCED,
        "rich",
    ),
    "an amount was counted that nobody ordered": (
        lambda world: world.balances.update({("shipped", "poor"): 1, ("confirmed", "poor"): 1}),
        Kind.UNBALANCED,
        "poor",
    ),
    "a balance is gone": (lambda world: world.balances.pop(("ordered", "rich")), Kind.UNBALANCED, "rich"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_world_has_exactly_its_violation(what: str) -> None:
    spoil, kind, culprit = BAD[what]
    world = good_world()
    spoil(world)
    assert world.violations() == [(kind, culprit)]


def test_what_is_in_doubt_is_not_resolved_while_sessions_are_open() -> None:
    world = good_world()
    world.open_sessions = 1
    in_doubt = ["in doubt, there", "in doubt, not there", "listener", "listener that failed"]
    assert world.violations() == [(Kind.UNRESOLVED, number) for number in in_doubt]


def test_a_broker_may_bury_twice_but_not_cause_a_second_effect() -> None:
    world = good_world()
    world.at_least_once = True
    world.letters.update(again=world.letters["rejected"], committed_again=world.letters["drivers"])
    assert world.violations() == []
    world.effects.append(world.effect("plain"))
    assert world.violations() == [(Kind.REPEATED, "plain")]


def test_the_start_of_an_isolated_message_is_no_theft_if_its_holder_does_it() -> None:
    world = good_world()
    world.changes += [
        change("worker-0.1", 1, False, 9, "poison", "poison", None, None, "apart"),
        change("worker-0.1", 2, False, 9, "poison", "poison", "apart", at(3), "started"),
    ]
    assert world.violations() == []
    world.change_row(-1, application="worker-1.1")
    assert world.violations() == [(Kind.STOLEN, "poison")]
    world.change_row(-2, queue="invoices")
    world.change_row(-1, queue="invoices", application="worker-0.1")
    assert world.violations() == [(Kind.STOLEN, "poison")]


def test_a_broker_may_bring_what_was_committed_again_but_does_not_let_all_of_it_count_as_done() -> None:
    world = good_world()
    world.at_least_once = True
    world.letters.pop("drivers")
    world.letters.pop("plain-drivers")
    assert world.violations() == []
    others = [emitted(f"driver {number}", "commits by its driver", "driver.commits") for number in range(9)]
    world.transactions["others"] = Transaction("others", tuple(others), (), COMMITTED)
    world.orders.add("others")
    for message in others:
        for queue in ("drivers", "plain-drivers"):
            world.effects.append(Effect(message.id, queue, 1, digest(message), 5.0))
            world.runs.append(Run(message.id, queue, 1))
    assert world.violations() == [
        (Kind.ALIVE, id) for id in ("driver", *(each.id for each in others)) for _ in range(2)
    ]


def test_what_its_driver_could_not_commit_may_be_tried_again() -> None:
    world = good_world()
    world.own_commits.remove(("driver", "drivers"))
    world.effects.remove(world.effect("driver", "drivers"))
    world.runs.append(Run("driver", "drivers", 2))
    assert world.violations() == []


def test_a_process_that_froze_while_it_wrote_to_sqlite_kept_all_others_away() -> None:
    world = good_world()
    world.change_row(4, old_until=at(5.5), application=None)
    world.change_row(3, application=None)
    assert world.violations() == [(Kind.LATE, "plain")]
    world.faults.append(Struck("freeze", "worker-1", at(5.2).timestamp(), at(5.9).timestamp()))
    assert world.violations() == []
    world.change_row(4, application="worker-1.1")
    world.change_row(3, application="worker-1.1")
    assert world.violations() == [(Kind.LATE, "plain")]


def test_a_process_of_a_server_is_late_although_it_froze() -> None:
    world = good_world()
    world.change_row(4, old_until=at(3.5))
    world.faults.append(Struck("freeze", "worker-1", at(3.2).timestamp(), at(5.9).timestamp()))
    assert world.violations() == [(Kind.LATE, "plain")]


def test_every_kind_of_violation_is_planted() -> None:
    assert {kind for _, kind, _ in BAD.values()} | {Kind.UNRESOLVED} == set(Kind)
