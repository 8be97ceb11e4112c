"""The command line: what each command says, on every database, and with which code it ends."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from outbox import Backlog, Outbox, QueueBacklog, Reject, listen
from outbox.cli.exits import ExitCode
from outbox.cli.status import Asking, Rates, Snapshot
from outbox.core.attempt import Done
from outbox.core.store import Selection
from outbox.testing.servers import PostgreSQL
from tests.support.commands import SOON, Command, all_dead, billing, broken, bury, in_state, line_of, until

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


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
            "transport": "database",
            "binding_keys": ["order.*"],
            "queued": 0,
            "retrying": 0,
            "leased": 0,
            "dead": 1,
            "oldest": None,
            "consumers": None,
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
    assert re.search(r"^QUEUE +BINDING KEYS +QUEUED +RETRYING +LEASED +DEAD +OLDEST$", ran.stdout, re.MULTILINE)
    assert re.search(r"^broken +order\.\* +0 +0 +0 +1 +-$", ran.stdout, re.MULTILINE)


async def test_status_has_a_field_for_everything_in_a_backlog(command: Command, outbox: Outbox) -> None:
    await outbox.create_tables()
    found = (await command.run("status", "--json", "--interval", "0")).document
    assert set(Backlog.__dataclass_fields__) <= set(found)


def test_rates_are_rows_written_and_rows_settled_between_two_looks() -> None:
    noon = datetime(2025, 1, 1, 12, tzinfo=UTC)
    before = Snapshot(noon, Backlog(waiting=10, rows_written=100, sent=5))
    queues = (
        QueueBacklog(queue="billing", queued=3, retrying=1),
        QueueBacklog(queue="billing", transport="rabbitmq", queued=7, retrying=None),
        QueueBacklog(queue="outbox.delay_10s", transport="rabbitmq", retrying=5),
    )
    after = Snapshot(
        noon + timedelta(seconds=2), Backlog(waiting=4, unroutable=2, rows_written=130, queues=queues, sent=9)
    )
    # 30 rows came; of 10 open ones 10 are open, so 30 were settled. Messages at a broker are no rows.
    assert Rates.between(before, after) == Rates(15.0, 15.0, 2.0)


async def test_status_tells_the_rates_of_what_happens_meanwhile(
    command: Command, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything happens between the two looks: a row that is being written while PostgreSQL is asked is half there."""
    await outbox.create_tables()
    module = sys.modules[Snapshot.__module__]
    look = module._look
    looked, happened = threading.Event(), threading.Event()

    async def looks(outbox: Outbox, condition: Asking) -> Snapshot:
        if looked.is_set():
            await asyncio.to_thread(happened.wait, SOON)
        found: Snapshot = await look(outbox, condition)
        looked.set()
        return found

    monkeypatch.setattr(module, "_look", looks)
    looking = asyncio.create_task(command.run("status", "--json", "--interval", "0.1"))
    assert await asyncio.to_thread(looked.wait, SOON)
    async with outbox.transaction() as session:
        await outbox.emit_many(session, "order.created", [{"id": number} for number in range(5)])
    async with outbox.store.feed.claim(Selection(limit=2, lease=timedelta(seconds=60))) as claim:
        await claim.settle({attempt.id: Done() for attempt in claim.attempts})
    happened.set()
    rates = (await looking).document["rates"]
    assert rates["seconds"] >= 0.1
    assert rates["rows_in_per_second"] * rates["seconds"] == pytest.approx(5, abs=0.1)
    assert rates["rows_out_per_second"] * rates["seconds"] == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_status_watches_until_a_signal_and_ends_with_0(sqlite_command: Command, number: signal.Signals) -> None:
    await sqlite_command.run("tables", "create")
    with sqlite_command.started("status", "--watch", "--json", "--interval", "0.1") as watching:
        lines = [json.loads(await asyncio.to_thread(line_of, watching)) for _ in range(3)]
        watching.send_signal(number)
        assert watching.wait(SOON) == 0
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
        await command.run("tables", "create")
        with command.started("status", "--watch", "--json", "--interval", "0.1") as watching:
            assert json.loads(await asyncio.to_thread(line_of, watching))["trouble"] is None
            server.stop("immediate")
            await asyncio.to_thread(_line_where, watching, lambda line: "cannot reach" in (line["trouble"] or ""))
            server.start()
            await asyncio.to_thread(_line_where, watching, lambda line: line["trouble"] is None)
            watching.terminate()
            assert watching.wait(SOON) == 0


def _line_where(process: subprocess.Popen[str], condition: Any) -> None:
    while not condition(json.loads(line_of(process))):
        pass


# Messages.


async def test_messages_are_listed_by_state_and_queue_a_page_at_a_time(command: Command, outbox: Outbox) -> None:
    async with outbox.running(listeners=[billing]):
        async with outbox.transaction() as session:
            emitted = await outbox.emit_many(session, "order.created", [{"id": number} for number in range(3)])
            await outbox.emit(session, "nobody.cares", {})
        await until(lambda: in_state(outbox, "retrying", 3))
        await until(lambda: in_state(outbox, "unroutable", 1))
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
    [failed], [waits] = first["messages"][0]["history"], unroutable[0]["history"]
    assert (failed["attempt"], failed["what"], waits["attempt"], waits["what"]) == (1, "failed", None, "unroutable")
    assert "nobody.cares" in waits["error"]
    shown = await command.run("messages", "list", "--state", "retrying", "--limit", "2")
    assert emitted[0].id in shown.stdout and emitted[2].id not in shown.stdout
    assert f"there may be more: --after {first['next_after']}" in shown.stdout


async def test_an_empty_list_says_why_it_may_be_empty(command: Command, outbox: Outbox) -> None:
    await outbox.create_tables()
    ran = await command.run("messages", "list")
    assert ran.code == 0
    assert "clean_up_after" in ran.stdout
    for arguments in (["queues", "list"], ["status", "--interval", "0"]):
        said = (await command.run(*arguments)).said
        assert "workers and relays with routes bind theirs when they start" in " ".join(said.split())


async def test_a_messages_walk_is_told_for_every_queue_it_is_in(command: Command, outbox: Outbox) -> None:
    async with outbox.running(listeners=[billing, broken]):
        async with outbox.transaction() as session:
            message = await outbox.emit(session, "order.created", {"id": 7}, key="order-7", headers={"tenant": "acme"})
        assert message is not None
        await until(lambda: in_state(outbox, "retrying", 1))
        await until(lambda: all_dead(outbox, 1))
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
        "due_at": None,
        "body_size": 8,
    }
    [place] = found["places"]
    assert (place["state"], place["queue"], place["attempt_count"], place["history"]) == ("waiting", None, 0, [])
    assert datetime.fromisoformat(place["due_at"]).tzinfo is not None
    assert place["row_id"].isdecimal()  # ids are strings


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
        assert all(isinstance(letter["id"], str) for letter in found["dead_letters"])
        return [int(letter["id"]) for letter in found["dead_letters"]]

    assert await listed() == ids
    assert await listed("--queue", "broken", "--reason", "rejected") == ids
    assert await listed("--queue", "other") == []
    assert await listed("--reason", "exhausted") == []
    assert await listed("--error", "order 1 is") == ids[1:2]
    assert await listed("--limit", "1", "--after", str(ids[0])) == ids[1:2]
    assert await listed("--routing-key", "order.changed") == ids
    assert await listed("--routing-key", "order") == []
    assert (await listed("--since", "1h"), await listed("--before", "1h")) == (ids, [])
    second = (await outbox.dead_letters.list())[1].died_at
    assert await listed("--since", second.isoformat()) == [
        letter.id for letter in await outbox.dead_letters.list() if letter.died_at >= second
    ]
    assert set(await listed("--before", f"{second:%Y-%m-%dT%H:%M:%S.%f}")) < set(ids)  # in UTC unless it says otherwise
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
    [entry] = found["history"]
    assert (entry["attempt"], entry["what"], entry["error"]) == (
        1,
        "was the last, rejected",
        "Reject: order 0 is wrong",
    )
    assert abs(datetime.fromisoformat(entry["at"]) - datetime.fromisoformat(found["died_at"])) < timedelta(minutes=1)
    assert (await command.run("dead-letters", "show", "999999")).code == ExitCode.WRONG


async def test_replaying_puts_the_chosen_ones_back_and_only_those(command: Command, outbox: Outbox) -> None:
    ids = await bury(outbox, 3)
    ran = await command.run("dead-letters", "replay", str(ids[1]))
    assert (ran.code, ran.stdout) == (0, "replayed 1 dead letter\n")
    assert [letter.id for letter in await outbox.dead_letters.list()] == [ids[0], ids[2]]
    assert [message.queue for message in await outbox.messages(state="queued")] == ["broken"]


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
    chosen = ("--error", "order 2", "--routing-key", "order.changed", "--since", "1h")
    ran = await command.run("dead-letters", "replay", "--all", *chosen, "--json")
    assert ran.document == {"ids": [str(ids[2])], "not_found": [], "replayed": 1, "dry_run": False}
    for others in (("--queue", "other"), ("--before", "1h"), ("--routing-key", "order.paid")):
        for verb in (["replay"], ["discard", "--yes"]):
            assert (await command.run("dead-letters", *verb, "--all", *others)).code == ExitCode.WRONG
    assert [letter.id for letter in await outbox.dead_letters.list()] == ids[:2]


@pytest.mark.parametrize("verb", ["replay", "discard"])
async def test_a_dry_run_changes_nothing(command: Command, outbox: Outbox, verb: str) -> None:
    ids = await bury(outbox, 2)
    ran = await command.run("dead-letters", verb, "--all", "--dry-run")
    assert ran.code == 0
    assert f"2 dead letters would be {verb}ed" in ran.stdout
    assert re.search(r"^ *2 +broken +rejected +order\.changed$", ran.stdout, re.MULTILINE)
    assert "order 1 is wrong" not in ran.stdout
    assert [letter.id for letter in await outbox.dead_letters.list()] == ids
    assert await outbox.messages() == []


async def test_a_rate_spreads_a_replay_over_time(sqlite_command: Command, sqlite_outbox: Outbox) -> None:
    outbox = sqlite_outbox
    await bury(outbox, 9)
    began = time.monotonic()
    ran = await sqlite_command.run("dead-letters", "replay", "--all", "--rate", "20", "--since", "1h")
    assert (ran.stdout, ran.stderr) == ("replayed 9 dead letters\n", "")  # what ends within a second shows no progress
    assert time.monotonic() - began >= 8 / 20 - 0.1


async def test_a_long_replay_shows_its_progress(sqlite_command: Command, sqlite_outbox: Outbox) -> None:
    await bury(sqlite_outbox, 4)
    ran = await sqlite_command.run("dead-letters", "replay", "--all", "--rate", "1.6")
    assert ran.stdout == "replayed 4 dead letters\n"
    assert re.fullmatch(r"replayed 3 of 4, \d+ms left\n", ran.stderr)


@pytest.mark.parametrize("time", ["yesterday", "2026-13-01", "2h ago", "90", ""])
async def test_what_is_no_time_is_refused_with_what_to_write(sqlite_command: Command, time: str) -> None:
    ran = await sqlite_command.run("dead-letters", "list", "--since", time)
    assert (ran.code, ran.stdout) == (ExitCode.USAGE, "")
    assert "2h" in ran.stderr


async def test_replaying_all_ends_although_each_of_them_dies_again(command: Command, outbox: Outbox) -> None:
    ids = await bury(outbox, 5)
    async with outbox.running(listeners=[broken]):
        ran = await command.run("dead-letters", "replay", "--all", "--json")
        assert ran.document["replayed"] == 5
        again = await until(lambda: all_dead(outbox, 5))
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
    sqlite_command: Command, sqlite_outbox: Outbox, answer: str, code: ExitCode, left: int
) -> None:
    outbox = sqlite_outbox
    await bury(outbox)
    ran = await asyncio.to_thread(
        sqlite_command.on_a_terminal, "dead-letters", "discard", "--all", answer=answer, columns=200
    )
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
        assert ran.document["tables"][0] == table_name and len(ran.document["tables"]) == 7


async def test_the_sql_of_the_tables_runs_as_it_stands(command: Command, table_name: str, database_url: str) -> None:
    ran = await command.run("tables", "sql")
    assert ran.code == 0
    engine = create_async_engine(database_url)
    async with engine.begin() as connection:
        for statement in filter(str.strip, ran.stdout.split(";\n")):
            await connection.execute(text(statement))
        if engine.dialect.name == "postgresql":
            options = await connection.scalar(text(f"SELECT reloptions FROM pg_class WHERE relname = '{table_name}'"))
            assert options is not None
            assert {"fillfactor=45", "autovacuum_vacuum_cost_delay=0"} <= set(options)
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
    assert first.stdout.count(" USING heap WITH (fillfactor = 45, ") == 1
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
    assert await outbox.store.maintenance.record_transport("database") == "database"
    forced = await command.run("tables", "switch-transport", "rabbitmq", "--force", "--json")
    assert (forced.code, forced.document["before"], forced.document["transport"]) == (0, "database", "rabbitmq")
    assert await outbox.store.maintenance.record_transport("database") == "rabbitmq"
    assert (await command.run("tables", "switch-transport", "rabbitmq")).code == 0


async def test_a_table_is_given_to_no_transport_that_does_not_exist(
    sqlite_command: Command, sqlite_outbox: Outbox
) -> None:
    await sqlite_outbox.create_tables()
    for name in ("bogus", "amqp"):  # a URL's scheme is no transport's name
        refused = await sqlite_command.run("tables", "switch-transport", name, "--force")
        assert refused.code == ExitCode.USAGE
        known = "database, function, http, memory, rabbitmq, routes"
        assert f"no transport is called '{name}'; there are: {known}" in refused.stderr
    assert await sqlite_outbox.store.maintenance.recorded_transport() is None
    await sqlite_outbox.store.maintenance.record_transport("ours")  # of a process elsewhere
    assert (await sqlite_command.run("tables", "switch-transport", "ours")).code == 0
    for name in ("memory", "database"):
        assert (await sqlite_command.run("tables", "switch-transport", name)).code == 0
        assert await sqlite_outbox.store.maintenance.recorded_transport() == name
    assert (await sqlite_command.run("tables", "switch-transport", "ours")).code == ExitCode.USAGE


# On a terminal.


async def test_on_a_terminal_of_80_columns_nothing_is_cut_and_no_line_is_longer(
    sqlite_command: Command, sqlite_outbox: Outbox
) -> None:
    outbox = sqlite_outbox

    @listen("warehouse.stock.counted_by_hand", queue="a.rather.long.name.of_a_module.on_stock_counted")
    async def listener(body: object) -> None:
        raise Reject("a rather long explanation of what is wrong with this message, and why it will never be right")

    async with outbox.running(listeners=[listener]):
        async with outbox.transaction() as session:
            message = await outbox.emit(session, "warehouse.stock.counted_by_hand", {})
        [letter] = await until(lambda: all_dead(outbox, 1))
    assert message is not None
    for arguments in (["status", "--interval", "0"], ["queues", "list"], ["dead-letters", "list"]):
        lines = await _lines_on_a_terminal(sqlite_command, *arguments)
        assert _column(lines, "QUEUE") == listener.queue
        if "dead-letters" in arguments:
            assert _column(lines, "ERROR").endswith("itwillneverberight")
        else:
            assert _column(lines, "BINDING KEYS") == listener.binding_key
    for arguments in (["messages", "show", message.id], ["dead-letters", "show", str(letter.id)]):
        lines = await _lines_on_a_terminal(sqlite_command, *arguments)
        assert any(message.id in line for line in lines) and any(listener.queue in line for line in lines)
    await outbox.dead_letters.replay([letter.id])
    lines = await _lines_on_a_terminal(sqlite_command, "messages", "list")
    assert _column(lines, "MESSAGE") == message.id and _column(lines, "QUEUE") == listener.queue


async def _lines_on_a_terminal(command: Command, *arguments: str) -> list[str]:
    ran = await asyncio.to_thread(command.on_a_terminal, *arguments)
    assert ran.code == 0
    assert ANSI.search(ran.stdout), "a terminal is not shown plain text"
    lines = [ANSI.sub("", line).rstrip() for line in ran.stdout.splitlines()]
    assert max(len(line) for line in lines) <= 80
    return lines


def _column(lines: list[str], heading: str) -> str:
    """What stands below a heading, put together again where it was broken."""
    head = next(number for number, line in enumerate(lines) if heading in line and line == line.upper())
    start = lines[head].index(heading)
    rest = re.match(rf"{heading} *", lines[head][start:])
    assert rest is not None
    end = start + rest.end() if lines[head][start + rest.end() :] else None
    return "".join(line[start:end].strip().replace(" ", "") for line in lines[head + 1 :])


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
