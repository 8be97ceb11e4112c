"""The command line: what each command says, on every database, and with which code it ends."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from typer.core import TyperGroup
from typer.main import get_command

from outbox import Backlog, Outbox, QueueBacklog, Reject, listen
from outbox.cli import app
from outbox.cli.exits import ExitCode
from outbox.cli.status import Look, Rates
from outbox.testing.servers import PostgreSQL

from .commands import Command, Ran, line_of, until

CANARY = "canary-7hX2"
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def command(database_url: str, table_name: str, tmp_path: Path) -> Command:
    """The command, on the database at hand."""
    return Command(tmp_path, {"OUTBOX_DB_ENGINE_URL": database_url, "OUTBOX_TABLE_NAME": table_name})


@pytest.fixture
def sqlite_command(tmp_path: Path) -> Command:
    """The command on a SQLite file, for what does not depend on the database."""
    return Command(tmp_path, {"OUTBOX_DB_ENGINE_URL": f"sqlite:///{tmp_path / 'outbox.db'}"})


@listen("order.created", queue="billing", retry_delays=(3600,))
async def billing(order: dict[str, int]) -> None:
    raise ConnectionError("the bank is away")


@listen("order.*", queue="broken")
async def broken(order: dict[str, int]) -> None:
    raise Reject(f"order {order['id']} is wrong")


async def bury(outbox: Outbox, count: int = 1, routing_key: str = "order.changed") -> list[int]:
    """Dead letters of the queue `broken`; their ids."""
    async with outbox.running(listeners=[broken]):
        async with outbox.transaction() as session:
            await outbox.emit_many(session, routing_key, [{"id": number} for number in range(count)])
        letters = await until(lambda: _all_dead(outbox, count))
    return [letter.id for letter in letters]


async def _all_dead(outbox: Outbox, count: int) -> list[Any]:
    letters = await outbox.dead_letters.list(limit=count)
    return letters if len(letters) == count else []


# Status.


async def test_status_counts_what_lies_where(command: Command, outbox: Outbox) -> None:
    await bury(outbox)
    async with outbox.transaction() as session:
        await outbox.emit(session, "order.changed", {"id": 1})
        await outbox.emit(session, "order.changed", {"id": 2}, eta=timedelta(hours=1))
    ran = await command.run("status", "--json", "--interval", "0")
    assert ran.code == 0
    found = ran.document
    assert {name: found[name] for name in ("waiting", "due", "dead", "sent", "unroutable", "leased")} == {
        "waiting": 2,
        "due": 1,
        "dead": 1,
        "sent": 0,
        "unroutable": 0,
        "leased": 0,
    }
    assert 0 <= found["oldest"] < 60
    assert found["queues"] == [
        {
            "queue": "broken",
            "binding_keys": ["order.*"],
            "delivered": 0,
            "retrying": 0,
            "leased": 0,
            "dead": 1,
            "oldest": None,
        }
    ]
    assert found["rates"] is None


async def test_status_says_the_same_to_people(command: Command, outbox: Outbox) -> None:
    await bury(outbox)
    async with outbox.transaction() as session:
        await outbox.emit_many(session, "order.changed", [{"id": 1}, {"id": 2}])
    ran = await command.run("status", "--interval", "0.05")
    assert ran.code == 0
    assert re.search(r"^  waiting +2, 2 of them due$", ran.stdout, re.MULTILINE)
    assert re.search(r"^  rows +0\.0 in, 0\.0 out, per second$", ran.stdout, re.MULTILINE)
    assert re.search(r"^QUEUE +BINDING KEYS +DELIVERED +RETRYING +LEASED +DEAD +OLDEST$", ran.stdout, re.MULTILINE)
    assert re.search(r"^broken +order\.\* +0 +0 +0 +1 +-$", ran.stdout, re.MULTILINE)


async def test_status_has_a_field_for_everything_in_a_backlog(command: Command, outbox: Outbox) -> None:
    await outbox.create_tables()
    found = (await command.run("status", "--json", "--interval", "0")).document
    assert set(Backlog.__dataclass_fields__) <= set(found)


def test_rates_are_rows_written_and_rows_settled_between_two_looks() -> None:
    noon = datetime(2025, 1, 1, 12, tzinfo=UTC)
    before = Look(noon, Backlog(waiting=10, rows_written=100, sent=5))
    queue = QueueBacklog(queue="billing", delivered=3, retrying=1)
    after = Look(
        noon + timedelta(seconds=2), Backlog(waiting=4, unroutable=2, rows_written=130, queues=(queue,), sent=9)
    )
    # 30 rows came; of 10 open ones 10 are open, so 30 were settled.
    assert Rates.between(before, after) == Rates(15.0, 15.0, 2.0)


async def test_status_tells_the_rates_of_what_happens_meanwhile(command: Command, outbox: Outbox) -> None:
    await outbox.create_tables()
    looking = asyncio.create_task(command.run("status", "--json", "--interval", "0.5"))
    while not looking.done():
        async with outbox.transaction() as session:
            await outbox.emit(session, "order.created", {"id": 1})
        await asyncio.sleep(0.01)
    rates = (await looking).document["rates"]
    assert rates["rows_in_per_second"] > 0
    assert rates["rows_out_per_second"] == 0
    assert rates["seconds"] >= 0.5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_status_watches_until_a_signal_and_ends_with_0(sqlite_command: Command, number: signal.Signals) -> None:
    await sqlite_command.run("tables", "create")
    with sqlite_command.started("status", "--watch", "--json", "--interval", "0.1") as watching:
        lines = [json.loads(await asyncio.to_thread(line_of, watching)) for _ in range(3)]
        watching.send_signal(number)
        assert watching.wait(30) == 0
    assert [line["rates"] is None for line in lines] == [True, False, False]


async def test_status_watches_in_plain_blocks_where_there_is_no_terminal(sqlite_command: Command) -> None:
    await sqlite_command.run("tables", "create")
    with sqlite_command.started("status", "--watch", "--interval", "0.1") as watching:
        headings = [
            line for _ in range(25) if (line := await asyncio.to_thread(line_of, watching)).startswith("outbox_")
        ]
        watching.terminate()
    assert len(headings) >= 2


async def test_a_watch_waits_for_a_database_that_goes_away(tmp_path: Path) -> None:
    with PostgreSQL() as server:
        command = Command(tmp_path, {"OUTBOX_DB_ENGINE_URL": server.url})
        with command.started("status", "--watch", "--json", "--interval", "0.1") as watching:
            assert json.loads(await asyncio.to_thread(line_of, watching))["trouble"] is None
            server.stop("immediate")
            await asyncio.to_thread(_line_where, watching, lambda line: "cannot reach" in (line["trouble"] or ""))
            server.start()
            await asyncio.to_thread(_line_where, watching, lambda line: line["trouble"] is None)
            watching.terminate()
            assert watching.wait(30) == 0


def _line_where(process: subprocess.Popen[str], condition: Any) -> None:
    while not condition(json.loads(line_of(process))):
        pass


# Messages.


async def test_messages_are_listed_by_state_and_queue_a_page_at_a_time(command: Command, outbox: Outbox) -> None:
    async with outbox.running(listeners=[billing]):
        async with outbox.transaction() as session:
            emitted = await outbox.emit_many(session, "order.created", [{"id": number} for number in range(3)])
            await outbox.emit(session, "nobody.cares", {})
        await until(lambda: _in_state(outbox, "retrying", 3))
        await until(lambda: _in_state(outbox, "unroutable", 1))
    first = (await command.run("messages", "list", "--queue", "billing", "--limit", "2", "--json")).document
    second = (
        await command.run(
            "messages", "list", "--queue", "billing", "--limit", "2", "--after", str(first["next_after"]), "--json"
        )
    ).document
    assert [found["message"]["id"] for found in first["messages"] + second["messages"]] == [
        message.id for message in emitted
    ]
    assert second["next_after"] is None
    unroutable = (await command.run("messages", "list", "--state", "unroutable", "--json")).document["messages"]
    assert [found["message"]["routing_key"] for found in unroutable] == ["nobody.cares"]
    shown = await command.run("messages", "list", "--state", "retrying", "--limit", "2")
    assert emitted[0].id in shown.stdout and emitted[2].id not in shown.stdout
    assert f"there may be more: --after {first['next_after']}" in shown.stdout


async def _in_state(outbox: Outbox, state: str, count: int) -> bool:
    return len(await outbox.messages(state=state)) == count


async def test_an_empty_list_says_why_it_may_be_empty(command: Command, outbox: Outbox) -> None:
    await outbox.create_tables()
    ran = await command.run("messages", "list")
    assert ran.code == 0
    assert "clean_up_after" in ran.stdout


async def test_a_messages_walk_is_told_for_every_queue_it_is_in(command: Command, outbox: Outbox) -> None:
    async with outbox.running(listeners=[billing, broken]):
        async with outbox.transaction() as session:
            message = await outbox.emit(session, "order.created", {"id": 7}, key="order-7", headers={"tenant": "acme"})
        assert message is not None
        await until(lambda: _in_state(outbox, "retrying", 1))
        await until(lambda: _all_dead(outbox, 1))
    ran = await command.run("messages", "show", message.id)
    assert ran.code == 0
    walk = [line.split()[0] for line in ran.stdout.splitlines() if line.startswith("  ") and line[2] != " "]
    assert walk[:4] == ["emitted", "key", "header", "body"]
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ"
    billed, died = ran.stdout.split("in queue broken")
    assert re.search(rf"in queue billing\n  routed +{when}\n  attempt 1 +{when} failed: ConnectionError: the ", billed)
    assert re.search(rf"  now +retrying after 1 attempt, the next is due {when}", billed)
    assert re.search(rf"  now +dead letter \d+ since {when}, after 1 attempt: rejected\n  error +", died)
    assert "order 7 is wrong" in died
    assert '{"id":7}' not in ran.stdout


async def test_a_walk_as_json_has_the_names_of_the_python_attributes(command: Command, outbox: Outbox) -> None:
    async with outbox.transaction() as session:
        message = await outbox.emit(session, "order.created", {"id": 7}, key="order-7", headers={"tenant": "acme"})
    assert message is not None
    found = (await command.run("messages", "show", message.id, "--json")).document
    assert found["message"] == {
        "id": message.id,
        "routing_key": "order.created",
        "content_type": "application/json",
        "headers": {"tenant": "acme"},
        "key": "order-7",
        "tracking_ids": [message.id],
        "created_at": message.created_at.isoformat(),
        "expires_at": None,
        "body_size": 8,
    }
    [place] = found["places"]
    assert (place["state"], place["queue"], place["attempt_count"], place["history"]) == ("waiting", None, 0, "")
    assert datetime.fromisoformat(place["due_at"]).tzinfo is not None


async def test_a_body_is_shown_only_on_request_as_text_or_in_base64(command: Command, outbox: Outbox) -> None:
    async with outbox.transaction() as session:
        in_words = await outbox.emit(session, "a", {"secret": "é"})
        in_bytes = await outbox.emit(session, "a", b"\xff\x00")
    assert in_words is not None and in_bytes is not None
    assert "secret" not in (await command.run("messages", "show", in_words.id)).stdout
    assert "body" not in (await command.run("messages", "show", in_words.id, "--json")).document["message"]
    assert '{"secret":"é"}' in (await command.run("messages", "show", in_words.id, "--body")).stdout
    assert "/wA=" in (await command.run("messages", "show", in_bytes.id, "--body")).stdout
    found = (await command.run("messages", "show", in_bytes.id, "--body", "--json")).document["message"]
    assert (found["body"], found["body_encoding"]) == ("/wA=", "base64")
    listed = (await command.run("messages", "list", "--body", "--json")).document["messages"]
    assert [(each["message"]["body"], each["message"]["body_encoding"]) for each in listed] == [
        ('{"secret":"é"}', "text"),
        ("/wA=", "base64"),
    ]


async def test_an_unknown_message_ends_with_1_and_a_hint(command: Command, outbox: Outbox) -> None:
    await outbox.create_tables()
    ran = await command.run("messages", "show", "no-such-id", "--json")
    assert (ran.code, ran.stdout) == (1, "")
    assert ran.stderr.startswith("error: no message has the id 'no-such-id'") and "clean_up_after" in ran.stderr


# Dead letters.


async def test_dead_letters_are_listed_by_queue_reason_and_error(command: Command, outbox: Outbox) -> None:
    ids = await bury(outbox, 3)

    async def listed(*options: str) -> list[int]:
        found = (await command.run("dead-letters", "list", "--json", *options)).document
        return [letter["id"] for letter in found["dead_letters"]]

    assert await listed() == ids
    assert await listed("--queue", "broken", "--reason", "rejected") == ids
    assert await listed("--queue", "other") == []
    assert await listed("--reason", "exhausted") == []
    assert await listed("--error", "order 1 is") == ids[1:2]
    assert await listed("--limit", "1", "--after", str(ids[0])) == ids[1:2]
    people = await command.run("dead-letters", "list", "--error", "order 1 is")
    assert re.search(rf"^ *{ids[1]} +broken +rejected +order\.changed .*order 1 is wrong$", people.stdout, re.MULTILINE)


async def test_a_dead_letter_is_shown_with_its_reason_and_error(command: Command, outbox: Outbox) -> None:
    [id] = await bury(outbox)
    ran = await command.run("dead-letters", "show", str(id))
    assert ran.code == 0
    assert "died in queue broken" in ran.stdout
    assert re.search(r"^  reason +rejected, after 1 attempt$", ran.stdout, re.MULTILINE)
    assert "order 0 is wrong" in ran.stdout and '{"id":0}' not in ran.stdout
    found = (await command.run("dead-letters", "show", str(id), "--json", "--body")).document
    assert (found["reason"], found["queue"], found["message"]["body"]) == ("rejected", "broken", '{"id":0}')
    assert (await command.run("dead-letters", "show", "999999")).code == ExitCode.WRONG


async def test_replaying_puts_the_chosen_ones_back_and_only_those(command: Command, outbox: Outbox) -> None:
    ids = await bury(outbox, 3)
    ran = await command.run("dead-letters", "replay", str(ids[1]))
    assert (ran.code, ran.stdout) == (0, "replayed 1 dead letter\n")
    assert [letter.id for letter in await outbox.dead_letters.list()] == [ids[0], ids[2]]
    assert [message.queue for message in await outbox.messages(state="delivered")] == ["broken"]


async def test_replaying_less_than_was_asked_for_ends_with_1(command: Command, outbox: Outbox) -> None:
    [id] = await bury(outbox)
    ran = await command.run("dead-letters", "replay", str(id), "999999")
    assert ran.code == ExitCode.WRONG
    assert "replayed 1 dead letter" in ran.stdout and "no dead letter has the id 999999" in ran.stderr
    nothing = await command.run("dead-letters", "replay", "--all", "--json")
    assert nothing.code == ExitCode.WRONG
    assert nothing.document == {"ids": [], "not_found": [], "replayed": 0, "dry_run": False}


async def test_replaying_all_goes_by_the_filters_of_the_list(command: Command, outbox: Outbox) -> None:
    ids = await bury(outbox, 3)
    ran = await command.run("dead-letters", "replay", "--all", "--error", "order 2", "--json")
    assert ran.document == {"ids": ids[2:], "not_found": [], "replayed": 1, "dry_run": False}
    assert (await command.run("dead-letters", "replay", "--all", "--queue", "other")).code == ExitCode.WRONG
    assert [letter.id for letter in await outbox.dead_letters.list()] == ids[:2]


@pytest.mark.parametrize("verb", ["replay", "discard"])
async def test_a_dry_run_changes_nothing(command: Command, outbox: Outbox, verb: str) -> None:
    ids = await bury(outbox, 2)
    ran = await command.run("dead-letters", verb, "--all", "--dry-run")
    assert ran.code == 0
    assert f"2 dead letters would be {verb}ed" in ran.stdout and "order 1 is wrong" in ran.stdout
    assert [letter.id for letter in await outbox.dead_letters.list()] == ids
    assert await outbox.messages() == []


async def test_a_rate_spreads_a_replay_over_time(sqlite_command: Command, make_sqlite_outbox: Outbox) -> None:
    outbox = make_sqlite_outbox
    await bury(outbox, 9)
    began = time.monotonic()
    ran = await sqlite_command.run("dead-letters", "replay", "--all", "--rate", "20")
    assert ran.stdout == "replayed 9 dead letters\n"
    assert time.monotonic() - began >= 8 / 20 - 0.1


async def test_replaying_all_ends_although_each_of_them_dies_again(command: Command, outbox: Outbox) -> None:
    ids = await bury(outbox, 5)
    async with outbox.running(listeners=[broken]):
        ran = await command.run("dead-letters", "replay", "--all", "--json")
        assert ran.document["replayed"] == 5
        again = await until(lambda: _all_dead(outbox, 5))
    assert min(letter.id for letter in again) > max(ids)


async def test_discarding_deletes_for_good(command: Command, outbox: Outbox) -> None:
    ids = await bury(outbox, 2)
    ran = await command.run("dead-letters", "discard", str(ids[0]), "--yes")
    assert (ran.code, ran.stdout) == (0, "discarded 1 dead letter\n")
    assert [letter.id for letter in await outbox.dead_letters.list()] == ids[1:]
    assert (await command.run("dead-letters", "discard", "--all", "--yes", "--json")).document["discarded"] == 1
    assert await outbox.dead_letters.list() == [] and await outbox.messages() == []


async def test_discarding_refuses_where_nobody_can_be_asked(command: Command, outbox: Outbox) -> None:
    await bury(outbox)
    ran = await command.run("dead-letters", "discard", "--all")
    assert ran.code == ExitCode.USAGE
    assert "--yes" in ran.stderr
    assert len(await outbox.dead_letters.list()) == 1


@pytest.mark.parametrize(("answer", "code", "left"), [("n\n", ExitCode.WRONG, 1), ("y\n", ExitCode.FINE, 0)])
async def test_discarding_asks_on_a_terminal(
    sqlite_command: Command, make_sqlite_outbox: Outbox, answer: str, code: ExitCode, left: int
) -> None:
    outbox = make_sqlite_outbox
    await bury(outbox)
    ran = await asyncio.to_thread(sqlite_command.on_a_terminal, "dead-letters", "discard", "--all", answer=answer)
    assert "order 0 is wrong" in ran.stdout and "Delete 1 dead letter for good?" in ran.stdout
    assert ran.code == code
    assert len(await outbox.dead_letters.list()) == left


@pytest.mark.parametrize("verb", ["replay", "discard"])
@pytest.mark.parametrize("arguments", [[], ["1", "--all"], ["1", "--queue", "q"], ["--queue", "q"]])
async def test_dead_letters_are_chosen_by_ids_or_by_all_and_never_by_accident(
    sqlite_command: Command, verb: str, arguments: list[str]
) -> None:
    ran = await sqlite_command.run("dead-letters", verb, *arguments)
    assert (ran.code, ran.stdout) == (ExitCode.USAGE, "")
    assert "--all" in ran.stderr


# Queues.


async def test_queues_are_listed_with_their_binding_keys(command: Command, outbox: Outbox) -> None:
    await bury(outbox)
    [queue] = (await command.run("queues", "list", "--json")).document["queues"]
    assert (queue["queue"], queue["binding_keys"], queue["dead"]) == ("broken", ["order.*"], 1)
    assert re.search(r"^broken +order\.\* +0 ", (await command.run("queues", "list")).stdout, re.MULTILINE)


async def test_removing_a_queue_says_what_still_lies_in_it(command: Command, outbox: Outbox) -> None:
    ids = await bury(outbox, 2)
    await outbox.dead_letters.replay(ids[:1])
    ran = await command.run("queues", "remove", "broken")
    assert ran.code == 0
    assert ran.stdout == "removed 1 binding of broken\nin it still: 1 message, 1 dead letter\n"
    assert await outbox.bindings() == []
    assert len(await outbox.messages(queue="broken")) == 1
    assert (await command.run("queues", "remove", "nobody")).code == ExitCode.WRONG


# Tables.


async def test_tables_are_made_and_making_them_again_does_no_harm(command: Command, table_name: str) -> None:
    for _ in range(2):
        ran = await command.run("tables", "create", "--json")
        assert ran.code == 0
        assert ran.document["tables"][0] == table_name and len(ran.document["tables"]) == 5


async def test_the_sql_of_the_tables_runs_as_it_stands(command: Command, table_name: str, database_url: str) -> None:
    ran = await command.run("tables", "sql")
    assert ran.code == 0
    url = database_url.replace("sqlite:", "sqlite+aiosqlite:")
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        for statement in ran.stdout.split(";\n"):
            await connection.execute(text(statement))
        if engine.dialect.name == "postgresql":
            options = await connection.scalar(text(f"SELECT reloptions FROM pg_class WHERE relname = '{table_name}'"))
            assert options is not None
            assert {"fillfactor=70", "autovacuum_vacuum_cost_delay=0"} <= set(options)
    await engine.dispose()
    outbox = Outbox(db_engine_url=database_url, table_name=table_name)
    async with outbox.transaction() as session:
        await outbox.emit(session, "order.created", {"id": 1})
    assert (await outbox.backlog()).waiting == 1
    await outbox.close()


async def test_the_sql_of_the_tables_is_the_same_each_time_and_needs_no_database(tmp_path: Path) -> None:
    command = Command(tmp_path, {"OUTBOX_TABLE_NAME": "shop_outbox", "OUTBOX_SCHEMA": "shop"})
    first, second = (
        command.process("tables", "sql", "--dialect", "postgresql", PYTHONHASHSEED=seed) for seed in ("1", "2")
    )
    assert (first.code, first.stderr) == (0, "")
    assert first.stdout == second.stdout
    assert "CREATE TABLE shop.shop_outbox (" in first.stdout
    assert "ALTER TABLE shop.shop_outbox SET (fillfactor = 70" in first.stdout
    in_sqlite = await command.run("tables", "sql", "--dialect", "sqlite")
    assert "fillfactor" not in in_sqlite.stdout and "AUTOINCREMENT" in in_sqlite.stdout


async def test_another_transport_gets_the_table_only_when_no_queue_holds_messages(
    command: Command, outbox: Outbox
) -> None:
    ids = await bury(outbox, 2)
    await outbox.dead_letters.replay(ids)
    refused = await command.run("tables", "switch-transport", "rabbitmq")
    assert refused.code == ExitCode.WRONG
    assert "2 messages lie in queues of the database" in refused.stderr
    assert await outbox.store.record_transport("database") == "database"
    forced = await command.run("tables", "switch-transport", "rabbitmq", "--force", "--json")
    assert (forced.code, forced.document["before"], forced.document["transport"]) == (0, "database", "rabbitmq")
    assert await outbox.store.record_transport("database") == "rabbitmq"
    assert (await command.run("tables", "switch-transport", "rabbitmq")).code == 0


# Relay and worker.


APPLICATION = """
import asyncio
import threading
import time

from outbox import Outbox, listen


@listen("short", queue="short")
async def short(body):
    print("began", flush=True)
    await asyncio.sleep(0.3)
    print("ended", flush=True)


@listen("long", queue="long")
async def long(body):
    print("began", flush=True)
    await asyncio.sleep(600)


@listen("long", queue="in_a_thread")
def in_a_thread(body):
    print("began", flush=True)
    time.sleep(600)


@listen("long", queue="waits_for_a_thread")
async def waits_for_a_thread(body):
    print("began", flush=True)
    await asyncio.to_thread(time.sleep, 600)


@listen("long", queue="stubborn")
async def stubborn(body):
    print("began", flush=True)
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass


everything = (short, long)
nothing = []
number = 3
other = Outbox(db_engine_url="sqlite:///other.db")
"""


@pytest.fixture
def application(command: Command) -> Command:
    (command.folder / "application.py").write_text(APPLICATION)
    return command


@pytest.fixture
def sqlite_application(sqlite_command: Command) -> Command:
    (sqlite_command.folder / "application.py").write_text(APPLICATION)
    return sqlite_command


@pytest.fixture
async def make_sqlite_outbox(sqlite_command: Command) -> Any:
    outbox = Outbox(db_engine_url=sqlite_command.settings["OUTBOX_DB_ENGINE_URL"], poll_interval=0.2)
    yield outbox
    await outbox.close()


async def test_a_worker_lets_its_listeners_end_and_ends_with_0(application: Command, outbox: Outbox) -> None:
    async with outbox.transaction() as session:
        await outbox.emit(session, "short", {})
    with application.started("worker", "application:everything") as worker:
        assert await asyncio.to_thread(line_of, worker) == "began"
        worker.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(line_of, worker) == "ended"
        stdout, log = await asyncio.to_thread(worker.communicate, timeout=30)
    assert (worker.returncode, stdout) == (0, "")
    assert "INFO outbox: worker started: transport database, queues short, long" in log
    assert "INFO outbox: handled short" in log and "INFO outbox: worker stopped" in log
    assert await outbox.messages() == []


async def test_a_second_signal_ends_a_worker_with_130_and_its_message_is_tried_again(
    application: Command, outbox: Outbox
) -> None:
    async with outbox.transaction() as session:
        await outbox.emit(session, "long", {})
    with application.started("worker", "application:long") as worker:
        assert await asyncio.to_thread(line_of, worker) == "began"
        worker.send_signal(signal.SIGINT)
        await asyncio.to_thread(_log_line_with, worker, "outbox: ", "started")
        worker.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(worker.wait, 30) == ExitCode.FORCED
    [message] = await outbox.messages()
    assert (message.state, message.attempt_count, message.crash_count) == ("delivered", 0, 0)


def _log_line_with(process: subprocess.Popen[str], *words: str) -> None:
    assert process.stderr is not None
    while not all(word in (line := process.stderr.readline()) for word in words):
        assert line, "it said nothing of the kind"


@pytest.mark.parametrize("listener", ["long", "in_a_thread", "waits_for_a_thread", "stubborn"])
async def test_a_listener_that_outlasts_the_grace_is_abandoned_and_the_process_ends_with_5(
    sqlite_application: Command, make_sqlite_outbox: Outbox, listener: str
) -> None:
    outbox = make_sqlite_outbox
    async with outbox.transaction() as session:
        await outbox.emit(session, "long", {})
    with sqlite_application.started("worker", f"application:{listener}", OUTBOX_GRACE="100ms") as worker:
        assert await asyncio.to_thread(line_of, worker) == "began"
        worker.send_signal(signal.SIGTERM)
        _, log = await asyncio.to_thread(worker.communicate, timeout=30)
    assert worker.returncode == ExitCode.ABANDONED, log
    assert "WARNING outbox:" in log


async def test_a_relay_routes_until_a_signal_and_ends_with_0(command: Command, outbox: Outbox) -> None:
    await outbox.create_tables()
    await outbox.store.bind([broken.binding])
    with command.started("relay", "--log-level", "debug") as relay:
        async with outbox.transaction() as session:
            await outbox.emit(session, "order.created", {"id": 1})
        await until(lambda: _in_state(outbox, "delivered", 1))
        relay.send_signal(signal.SIGTERM)
        _, log = await asyncio.to_thread(relay.communicate, timeout=30)
    assert relay.returncode == 0
    assert "DEBUG outbox: routed 1 messages to broken" in log and "INFO outbox: relay stopped" in log


async def test_a_named_outbox_is_used_instead_of_the_singleton(sqlite_application: Command) -> None:
    command = sqlite_application
    made = command.process("tables", "create", "--outbox", "application:other")
    assert made.code == 0
    assert (command.folder / "other.db").exists() and not (command.folder / "outbox.db").exists()


async def test_a_module_alone_is_imported_for_the_setup_in_it(tmp_path: Path) -> None:
    (tmp_path / "settled.py").write_text('from outbox import setup\nsetup(db_engine_url="sqlite:///here.db")\n')
    assert Command(tmp_path).process("tables", "create", "--outbox", "settled").code == 0
    assert (tmp_path / "here.db").exists()


@pytest.mark.parametrize(
    ("target", "code", "words"),
    [
        ("application", ExitCode.USAGE, "MODULE:ATTRIBUTE"),
        ("no_such_module:listeners", ExitCode.CONFIGURATION, "no module is called 'no_such_module'"),
        ("application.part:listeners", ExitCode.CONFIGURATION, "application"),
        ("application:absent", ExitCode.CONFIGURATION, "has no attribute 'absent'"),
        ("application:number", ExitCode.CONFIGURATION, "is a int, not a Listener"),
        ("application:nothing", ExitCode.CONFIGURATION, "at least one listener"),
    ],
)
async def test_a_worker_says_in_one_line_what_is_wrong_with_its_target(
    sqlite_application: Command, target: str, code: ExitCode, words: str
) -> None:
    ran = sqlite_application.process("worker", target)
    assert (ran.code, ran.stdout) == (code, "")
    assert words in ran.stderr
    assert _error_lines(ran) == 1


async def test_a_module_that_fails_is_shown_where_it_fails_but_not_its_credentials(sqlite_command: Command) -> None:
    module = (
        f'url = "postgresql://shop:{CANARY}@db/shop"\n\n\ndef boom():\n    raise ValueError("no: " + url)\n\n\nboom()\n'
    )
    (sqlite_command.folder / "failing.py").write_text(module)
    ran = sqlite_command.process("worker", "failing:listeners")
    assert ran.code == ExitCode.CONFIGURATION
    assert 'failing.py", line 4, in boom' in ran.stderr and "ValueError: no: postgresql://***@db/shop" in ran.stderr
    assert "importlib" not in ran.stderr and CANARY not in ran.said


async def test_a_worker_of_another_transport_is_refused_in_one_line(application: Command, outbox: Outbox) -> None:
    await outbox.store.record_transport("rabbitmq")
    ran = application.process("worker", "application:everything")
    assert (ran.code, _error_lines(ran)) == (ExitCode.CONFIGURATION, 1)
    assert "outbox tables switch-transport database" in ran.stderr and "Traceback" not in ran.stderr


# Failures.


def _error_lines(ran: Ran) -> int:
    return sum(line.startswith("error: ") for line in ran.stderr.splitlines()) if "Traceback" not in ran.stderr else -1


async def test_without_a_database_the_command_says_what_to_set(tmp_path: Path) -> None:
    ran = Command(tmp_path).process("status")
    assert (ran.code, ran.stdout, len(ran.stderr.splitlines())) == (ExitCode.CONFIGURATION, "", 1)
    assert "OUTBOX_DB_ENGINE_URL" in ran.stderr


@pytest.mark.parametrize("setting", [{"OUTBOX_LEASE": "soon"}, {"OUTBOX_TABLE_NAME": "no-name"}])
async def test_a_setting_that_cannot_be_ends_with_3(sqlite_command: Command, setting: dict[str, str]) -> None:
    ran = await sqlite_command.run("tables", "create", **setting)
    assert (ran.code, ran.stdout, len(ran.stderr.splitlines())) == (ExitCode.CONFIGURATION, "", 1)


@pytest.fixture(scope="module")
def guarded_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A PostgreSQL that asks the role `guarded` for its password, with a wrong one in the URL."""
    rules = tmp_path_factory.mktemp("guarded") / "pg_hba.conf"
    rules.write_text("host all guarded 127.0.0.1/32 scram-sha-256\nhost all all 127.0.0.1/32 trust\n")
    rules.chmod(0o644)
    rules.parent.chmod(0o755)
    with PostgreSQL(settings={"hba_file": str(rules)}) as server:
        asyncio.run(_execute(server.url, "CREATE ROLE guarded LOGIN PASSWORD 'another'"))
        url = make_url(server.url).set(username="guarded", password=CANARY)
        yield url.render_as_string(hide_password=False)


async def _execute(url: str, statement: str) -> None:
    engine = create_async_engine(url.replace("postgresql:", "postgresql+asyncpg:"))
    async with engine.begin() as connection:
        await connection.execute(text(statement))
    await engine.dispose()


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
@pytest.mark.parametrize("wrong", ["port", "host", "password", "database"])
def test_a_database_that_cannot_be_reached_is_one_line_without_credentials(
    guarded_url: str, tmp_path: Path, driver: str, wrong: str
) -> None:
    url = make_url(guarded_url).set(drivername=f"postgresql+{driver}")
    match wrong:
        case "port":
            url = url.set(port=1)
        case "host":
            url = url.set(host="nowhere.invalid")
        case "database":
            url = url.set(database="nowhere", username="outbox")
    command = Command(tmp_path, {"OUTBOX_DB_ENGINE_URL": url.render_as_string(hide_password=False)})
    ran = command.run_now("status", "--json")
    assert (ran.code, ran.stdout, len(ran.stderr.splitlines())) == (ExitCode.UNREACHABLE, "", 1)
    assert ran.stderr.startswith(f"error: cannot reach the database {url.host}:{url.port}/{url.database}: ")
    assert CANARY not in ran.said


@pytest.mark.parametrize("arguments", [["relay"], ["worker", "application:everything"]])
async def test_relay_and_worker_end_with_4_if_they_cannot_reach_the_database(
    sqlite_application: Command, arguments: list[str]
) -> None:
    url = f"postgresql://shop:{CANARY}@127.0.0.1:1/shop"
    ran = sqlite_application.process(*arguments, OUTBOX_DB_ENGINE_URL=url)
    assert (ran.code, ran.stdout, _error_lines(ran)) == (ExitCode.UNREACHABLE, "", 1)
    assert CANARY not in ran.said


async def test_a_file_that_is_no_database_and_one_that_is_not_there(sqlite_command: Command) -> None:
    file = sqlite_command.folder / "outbox.db"
    missing = await sqlite_command.run("status")
    assert (missing.code, missing.stdout) == (ExitCode.UNREACHABLE, "")
    assert str(file) in missing.stderr
    assert not file.exists(), "looking must not make what it looks for"
    file.write_text("something else entirely, and long enough to be looked at as a header" * 20)
    ran = await sqlite_command.run("status")
    assert (ran.code, len(ran.stderr.splitlines())) == (ExitCode.UNREACHABLE, 1)


@pytest.mark.parametrize("arguments", [["nonsense"], ["status", "--nonsense"], ["messages", "list", "--state", "dead"]])
async def test_a_command_that_does_not_exist_ends_with_2(sqlite_command: Command, arguments: list[str]) -> None:
    ran = await sqlite_command.run(*arguments)
    assert (ran.code, ran.stdout) == (ExitCode.USAGE, "")


def test_a_pipe_that_is_closed_early_is_no_error(sqlite_command: Command) -> None:
    script = f"{sys.executable} -m outbox tables sql --dialect postgresql | head -1"
    ran = subprocess.run(
        ["bash", "-c", script], env=sqlite_command.environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout == "CREATE TABLE outbox_table (\n"
    assert ran.stderr == ""


# Secrets and strangers.


def every_command() -> Iterator[list[str]]:
    root = get_command(app)
    assert isinstance(root, TyperGroup)
    for name, found in root.commands.items():
        if isinstance(found, TyperGroup):
            yield from ([name, inner] for inner in found.commands)
        else:
            yield [name]


ARGUMENTS = {
    "messages show": ["no-such-id"],
    "dead-letters show": ["1"],
    "dead-letters replay": ["--all"],
    "dead-letters discard": ["--all", "--yes"],
    "queues remove": ["nobody"],
    "tables switch-transport": ["database"],
    "worker": ["application:everything"],
}
PLAYS_BY_ITSELF = ("demo",)  # it forgets the environment's settings


@pytest.mark.parametrize("words", list(every_command()), ids=" ".join)
async def test_no_command_shows_a_password_nor_steers_the_terminal(
    words: list[str], postgresql_url: str, table_name: str, tmp_path: Path
) -> None:
    (tmp_path / "application.py").write_text(APPLICATION)
    url = make_url(postgresql_url).set(password=CANARY).render_as_string(hide_password=False)
    command = Command(tmp_path, {"OUTBOX_DB_ENGINE_URL": url, "OUTBOX_TABLE_NAME": table_name})
    arguments = ARGUMENTS.get(" ".join(words), [])
    ran = [await command.run(*words, "--help")]
    if words[0] not in PLAYS_BY_ITSELF:
        unreachable = f"postgresql://shop:{CANARY}@127.0.0.1:1/shop"
        ran.append(command.process(*words, *arguments, OUTBOX_DB_ENGINE_URL=unreachable))
    if words[0] not in ("worker", "relay", *PLAYS_BY_ITSELF):
        ran.append(await command.run(*words, *arguments))
        if "--json" in ran[0].stdout:
            ran.append(await command.run(*words, *arguments, "--json"))
    for each in ran:
        assert each.said
        assert CANARY not in each.said
        assert "\x1b" not in each.said
        assert "Traceback" not in each.said


HOSTILE = "a.\u202e[bold red]b[/]\x9b31m.{x}"


async def test_what_a_stranger_wrote_is_shown_and_never_obeyed(command: Command, outbox: Outbox) -> None:
    @listen("#", queue="[link=file:///etc]q[/link]")
    async def hostile(body: object) -> None:
        raise Reject("\x1b]0;title\x07 [red]error[/red] \u2066 \x9b2J")

    async with outbox.running(listeners=[hostile]):
        async with outbox.transaction() as session:
            message = await outbox.emit(session, HOSTILE, "\x1b[2J", key="k\x85[u]", headers={"x": "\x9bm[i]"})
        assert message is not None
        [letter] = await until(lambda: _all_dead(outbox, 1))
    ran = [
        await command.run("status", "--interval", "0"),
        await command.run("queues", "list"),
        await command.run("dead-letters", "list", "--body"),
        await command.run("dead-letters", "show", str(letter.id), "--body"),
        await command.run("messages", "show", message.id, "--body"),
    ]
    await outbox.dead_letters.replay([letter.id])
    ran += [
        await command.run("messages", "list", "--body"),
        await command.run("messages", "show", message.id, "--body"),
        await command.run("messages", "list", "--body", "--json"),
    ]
    for each in ran:
        assert each.code == 0
        assert not [sign for sign in each.stdout if not sign.isprintable() and sign != "\n"]
    assert r"a.\u202e[bold red]b[/]\x9b31m.{x}" in ran[4].stdout
    assert r"[red]error[/red] \u2066 \x9b2J" in ran[3].stdout
    assert "[link=file:///etc]q[/link]" in ran[0].stdout
    assert ran[-1].document["messages"][0]["message"]["routing_key"] == HOSTILE


async def test_logs_escape_what_a_stranger_wrote(sqlite_application: Command, make_sqlite_outbox: Outbox) -> None:
    outbox = make_sqlite_outbox
    module = 'from outbox import listen\n\n\n@listen("#", queue="q")\nasync def listener(body):\n    pass\n'
    (sqlite_application.folder / "quiet.py").write_text(module)
    async with outbox.transaction() as session:
        await outbox.emit(session, HOSTILE, {})
    with sqlite_application.started("worker", "quiet:listener") as worker:
        await until(lambda: _no_message(outbox))
        worker.terminate()
        _, log = await asyncio.to_thread(worker.communicate, timeout=30)
    assert r"handled a.\u202e[bold red]b[/]\x9b31m.{x}" in log
    assert not [sign for sign in log if not sign.isprintable() and sign != "\n"]


async def _no_message(outbox: Outbox) -> bool:
    return not await outbox.messages()


async def test_on_a_terminal_of_80_columns_nothing_is_cut_and_no_line_is_longer(
    sqlite_command: Command, make_sqlite_outbox: Outbox
) -> None:
    outbox = make_sqlite_outbox

    @listen("warehouse.stock.counted_by_hand", queue="a.rather.long.name.of_a_module.on_stock_counted")
    async def listener(body: object) -> None:
        raise Reject("a rather long explanation of what is wrong with this message, and why it will never be right")

    async with outbox.running(listeners=[listener]):
        async with outbox.transaction() as session:
            message = await outbox.emit(session, "warehouse.stock.counted_by_hand", {})
        [letter] = await until(lambda: _all_dead(outbox, 1))
    assert message is not None
    for arguments, whole in [
        (["status", "--interval", "0"], [listener.queue, listener.binding_key]),
        (["dead-letters", "list"], [listener.queue, "and why it will never be right"]),
        (["dead-letters", "show", str(letter.id)], [message.id, listener.queue]),
        (["messages", "show", message.id], [message.id, listener.queue]),
    ]:
        ran = await asyncio.to_thread(sqlite_command.on_a_terminal, *arguments)
        assert ran.code == 0
        lines = [ANSI.sub("", line).rstrip() for line in ran.stdout.splitlines()]
        assert max(len(line) for line in lines) <= 80
        for value in whole:
            assert _is_whole(value, lines), (value, lines)


def _is_whole(value: str, lines: list[str]) -> bool:
    """Whether all of a value is there, perhaps broken over the lines of one column."""
    letters = iter(re.sub(r"\s", "", "".join(lines)))
    return all(letter in letters for letter in re.sub(r"\s", "", value))


# The help.


async def test_the_help_tells_every_exit_code(sqlite_command: Command) -> None:
    ran = await sqlite_command.run("--help")
    for code in ExitCode:
        assert re.search(rf"^ +{code.value}  {re.escape(code.meaning)}$", ran.stdout, re.MULTILINE), code


async def test_the_version_is_that_of_the_distribution(sqlite_command: Command) -> None:
    assert re.fullmatch(r"\d+\.\d+\S*\n", (await sqlite_command.run("--version")).stdout)


def test_the_file_of_a_look_is_left_as_it_was(sqlite_command: Command) -> None:
    assert sqlite_command.run_now("tables", "create").code == 0
    file = sqlite_command.folder / "outbox.db"
    before = file.read_bytes()
    for words in (["status", "--interval", "0"], ["messages", "list"], ["dead-letters", "list"], ["queues", "list"]):
        assert sqlite_command.run_now(*words).code == 0
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    assert file.read_bytes() == before
