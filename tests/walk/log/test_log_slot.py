"""The slot: made, refused, waited for, lost and found again."""

from __future__ import annotations

import asyncio
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

from outbox import ConfigurationError, Outbox
from outbox.cli.exits import ExitCode
from outbox.core.errors import FeedMismatch, LogUnreadable
from outbox.core.events import Advised, Failed, SlotInUse, SlotTaken, Troubled
from outbox.stores.postgresql.roles import roles_sql
from outbox.stores.postgresql.wal.connection import ReplicationConnection
from tests.support.commands import SOON, Command, line_of

from .conftest import Place


async def execute(outbox: Outbox, statement: str) -> Any:
    engine = outbox.engines.asynchronous.execution_options(isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        result = await connection.execute(text(statement))
        return result.scalar() if result.returns_rows else None


@pytest.fixture
def wal_command(log_url: str, table_name: str, tmp_path: Path) -> Command:
    settings = {"OUTBOX_DB_ENGINE_URL": log_url, "OUTBOX_TABLE_NAME": table_name, "OUTBOX_RELAY_FROM": "wal"}
    return Command(tmp_path, settings)


async def test_a_relay_without_a_slot_does_not_start_and_says_what_to_run(make: Any) -> None:
    relay = make()
    await relay.create_tables()
    with pytest.raises(ConfigurationError, match=r"no publication .*run outbox wal create"):
        async with relay.running(relay=True):
            pass
    await relay.wal.create()
    await execute(relay, f"SELECT pg_drop_replication_slot('{relay.wal.name}')")
    with pytest.raises(ConfigurationError, match=r"no slot .*run outbox wal create"):
        async with relay.running(relay=True):
            pass


async def test_a_relay_that_polls_is_refused_once_another_reads_the_log(outbox: Outbox, make: Any, emit: Any) -> None:
    polls = make(relay_from="table")
    async with polls.running(relay=True):
        pass  # nobody has read the log yet
    async with outbox.running(relay=True):
        with pytest.raises(FeedMismatch, match="outbox relay --from wal"):
            async with polls.running(relay=True):
                pass
    with pytest.raises(FeedMismatch):
        async with polls.running(relay=True):
            pass


async def test_a_relay_that_polls_ends_when_another_begins_to_read_the_log(
    outbox: Outbox, make: Any, emit: Any, place: Place, recorder: Any, until_empty: Any
) -> None:
    """What both had at that moment may go out twice. Nothing is lost, and the error says what to do."""
    polling = asyncio.create_task(relaying(make(relay_from="table")))
    await emit("polled")
    await place.until(1)
    async with outbox.running(relay=True):
        await emit(*map(str, range(50)))
        async with asyncio.timeout(SOON):
            with pytest.raises(FeedMismatch, match="outbox relay --from wal"):
                await polling
        await emit("afterwards")
        await until_empty()
    [failed] = recorder.of(Failed)
    assert isinstance(failed.error, FeedMismatch)
    assert set(place.bodies) == {"polled", "afterwards", *map(str, range(50))}


async def relaying(outbox: Outbox) -> None:
    async with outbox.running(relay=True):
        await asyncio.Event().wait()


async def test_after_a_drop_a_relay_that_polls_finds_everything(
    outbox: Outbox, make: Any, emit: Any, place: Place, until_empty: Any
) -> None:
    async with outbox.running(relay=True):
        await emit("by the log")
        await place.until(1)
        await until_empty()
    await emit("left")
    await outbox.wal.drop()
    async with make(relay_from="table").running(relay=True):
        assert await place.until(2) == ["by the log", "left"]
        await until_empty()


async def test_a_second_relay_stands_by_and_takes_over(
    outbox: Outbox, make: Any, emit: Any, place: Place, recorder: Any, until_empty: Any
) -> None:
    ended = asyncio.Event()

    async def first() -> None:
        async with outbox.running(relay=True):
            await ended.wait()

    running = asyncio.create_task(first())
    await emit("a")
    await place.until(1)
    async with make(slot_in_use_delay=0.2).running(relay=True):
        await recorder.wait_for(SlotInUse)
        assert (await outbox.wal.status()).standbys == 1
        await emit("b")
        await place.until(2)
        ended.set()
        await running
        async with asyncio.timeout(5):
            await recorder.wait_for(SlotTaken, 2)
        await emit("c")
        assert await place.until(3) == ["a", "b", "c"]
        await until_empty()
        status = await outbox.wal.status()
        assert (status.standbys, status.problems) == (0, ())
        assert status.active_pid is not None


async def test_a_walsender_that_is_ended_is_replaced_and_nothing_is_lost(
    outbox: Outbox, emit: Any, place: Place, recorder: Any, until_empty: Any
) -> None:
    async with outbox.running(relay=True):
        for number in range(60):
            await emit(str(number))
            if number % 20 == 10:
                await terminate(outbox)
        await until_empty()
        await recorder.wait_for(Troubled)
    assert list(dict.fromkeys(place.bodies)) == [str(number) for number in range(60)]


async def test_a_slot_that_is_dropped_in_mid_load_is_reported_and_what_it_missed_is_found(
    outbox: Outbox, emit: Any, place: Place, recorder: Any, until_empty: Any
) -> None:
    async with outbox.running(relay=True):
        await emit("before")
        await place.until(1)
        await terminate(outbox)
        await drop_slot(outbox)
        await emit("missed", "missed too")
        [*_, trouble] = await recorder.wait_for(Troubled)
        async with asyncio.timeout(10):
            while "run outbox wal create" not in str(recorder.of(Troubled)[-1].error):
                await asyncio.sleep(0.05)
        assert "missed" not in place.bodies, "nothing is made again in silence"
        assert await outbox.wal.create() == [f"made the slot {outbox.wal.name}"]
        await emit("after")
        await place.until(4)
        await until_empty()
        assert sorted(place.bodies) == ["after", "before", "missed", "missed too"]
        assert trouble


async def test_a_slot_that_was_made_again_by_hand_loses_nothing(
    outbox: Outbox, emit: Any, place: Place, recorder: Any, until_empty: Any
) -> None:
    async with outbox.running(relay=True):
        await emit("before")
        await place.until(1)
        await until_empty()
    await emit("missed")
    await drop_slot(outbox)
    await execute(outbox, f"SELECT pg_create_logical_replication_slot('{outbox.wal.name}', 'pgoutput')")
    await emit("after")
    async with outbox.running(relay=True):
        await place.until(3)
        await until_empty()
        assert sorted(place.bodies) == ["after", "before", "missed"]
        [advised] = await recorder.wait_for(Advised)
        assert "1 messages were in the table" in advised.advice


async def test_a_slot_that_somebody_moved_loses_nothing(
    outbox: Outbox, emit: Any, place: Place, until_empty: Any
) -> None:
    await emit("passed by")
    await execute(outbox, f"SELECT pg_replication_slot_advance('{outbox.wal.name}', pg_current_wal_lsn())")
    async with outbox.running(relay=True):
        assert await place.until(1) == ["passed by"]
        await until_empty()


async def test_a_frame_that_cannot_be_decoded_ends_the_relay_and_loses_nothing(
    outbox: Outbox, emit: Any, place: Place, until_empty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ReplicationConnection.frame

    def garbled(self: ReplicationConnection) -> bytes | None:
        frame = original(self)
        return frame[:25] + b"?" + frame[26:] if frame is not None and frame[25:26] == b"I" else frame

    monkeypatch.setattr(ReplicationConnection, "frame", garbled)
    await emit("kept")
    with pytest.raises(LogUnreadable, match="no message b'\\?'"):
        async with outbox.running(relay=True):
            await asyncio.Event().wait()
    monkeypatch.undo()
    async with outbox.running(relay=True):
        assert await place.until(1) == ["kept"]
        await until_empty()


async def test_rows_whose_primary_key_is_changed_by_hand_and_a_truncated_table(
    outbox: Outbox, emit: Any, place: Place, until_empty: Any
) -> None:
    table = outbox.tables.messages.fullname
    async with outbox.running(relay=True):
        # Until the slot is taken rows are looked for by their id, and one that moved is swept later.
        await emit("first")
        await place.until(1)
        place.opened.clear()
        await emit("moved")
        await execute(outbox, f"UPDATE {table} SET id = id + 100000")
        place.opened.set()
        await place.until(2)
        await emit("kept")
        await place.until(3)
        await execute(outbox, f"TRUNCATE {table}")
        await emit("after")
        await place.until(4)
        await execute(outbox, f"ALTER TABLE {table} ADD COLUMN further text")
        await emit("wider")
        await place.until(5)
        await until_empty()
    assert place.bodies == ["first", "moved", "kept", "after", "wider"]


async def test_the_command_makes_shows_and_drops_the_slot(wal_command: Command, make: Any, table_name: str) -> None:
    await make().create_tables()
    missing = await wal_command.run("wal", "status")
    assert missing.code == ExitCode.UNHEALTHY
    assert "missing" in missing.stdout and "run outbox wal create" in missing.stdout
    sql = await wal_command.run("wal", "create", "--sql", "--role", "reads")
    assert 'ALTER ROLE "reads" WITH REPLICATION' in sql.stdout
    assert "pg_create_logical_replication_slot" in sql.stdout
    made = await wal_command.run("wal", "create")
    assert made.code == 0
    assert made.stdout.splitlines()[1] == f"made the slot outbox_postgres_{table_name}"
    assert (await wal_command.run("wal", "create")).stdout.endswith("are there\n")
    again = await wal_command.run("wal", "create", "--recreate", "--json")
    assert len(again.document["done"]) == 2
    status = await wal_command.run("wal", "status")
    assert (status.code, "no relay has it" in status.stdout) == (0, True)
    document = (await wal_command.run("wal", "status", "--json")).document
    assert (document["wal_status"], document["exists"], document["problems"]) == ("reserved", True, [])
    doctor = await wal_command.run("doctor")
    assert "no relay has the slot" in doctor.stdout
    shown = await wal_command.run("status", "--interval", "0")
    assert "no relay has it" in shown.stdout
    dropped = await wal_command.run("wal", "drop")
    assert len(dropped.stdout.splitlines()) == 2
    assert (await wal_command.run("wal", "drop")).stdout == "there is nothing to drop\n"


async def test_the_relay_command_reads_the_log(
    wal_command: Command, outbox: Outbox, emit: Any, until_empty: Any
) -> None:
    (wal_command.folder / "application.py").write_text(
        "import outbox\n\n\nasync def publish(message):\n    print(message.body.decode(), flush=True)\n\n\n"
        "outbox.setup(transport=publish)\n"
    )
    wal_command.settings.pop("OUTBOX_RELAY_FROM")
    with wal_command.started("relay", "--from", "wal", "--outbox", "application") as relay:
        await emit("hello")
        assert await asyncio.to_thread(line_of, relay) == "hello"
        await until_empty()
        relay.send_signal(signal.SIGTERM)
        _, log = await asyncio.to_thread(relay.communicate, timeout=SOON)
    assert relay.returncode == 0, log
    assert "the relay reads the write-ahead log by the slot" in log
    refused = await asyncio.to_thread(wal_command.process, "relay", "--outbox", "application")
    assert refused.code == ExitCode.CONFIGURATION
    assert "--from wal" in refused.stderr


async def test_roles_with_no_more_rights_than_they_need(
    outbox: Outbox, make: Any, emit: Any, place: Place, table_name: str, log_url: str, until_empty: Any, recorder: Any
) -> None:
    """The relay's role may not read the log, and the role that reads the log may not read the table."""
    tables = outbox.tables
    script = roles_sql(tables, f"r{table_name}")
    for statement in (
        script,
        f"CREATE ROLE {table_name}_relays LOGIN IN ROLE r{table_name}_relay",
        f"CREATE ROLE {table_name}_reads LOGIN REPLICATION",
    ):
        await execute_script(outbox, statement)
    as_relay = log_url.replace("outbox@", f"{table_name}_relays@")
    place.refused.add("refused")
    with pytest.raises(ConfigurationError, match="WITH REPLICATION"):
        async with make(db_engine_url=as_relay).running(relay=True):
            pass
    as_reader = log_url.replace("outbox@", f"{table_name}_reads@")
    await emit("by another role", "refused")
    await execute(outbox, f"SELECT pg_replication_slot_advance('{outbox.wal.name}', pg_current_wal_lsn())")
    relay = make(db_engine_url=as_relay, wal_url=as_reader, relay_retry_delays=())
    async with relay.running(relay=True):
        await emit("as it is", "refused")
        await emit("later", eta=timedelta(seconds=0.3))
        await place.until(3)
        await until_empty()
    assert recorder.of(Troubled) == []
    assert len(await outbox.dead_letters.list()) == 2


async def execute_script(outbox: Outbox, script: str) -> None:
    with psycopg.connect(str(outbox.settings.db_engine_url).replace("+asyncpg", ""), autocommit=True) as connection:
        connection.execute(script)


async def terminate(outbox: Outbox) -> None:
    """End the server's process that sends to the relay."""
    async with asyncio.timeout(20):
        while (pid := (await outbox.wal.status()).active_pid) is None:
            await asyncio.sleep(0.02)
    await execute(outbox, f"SELECT pg_terminate_backend({pid})")


async def drop_slot(outbox: Outbox) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                await execute(outbox, f"SELECT pg_drop_replication_slot('{outbox.wal.name}')")
            except Exception:  # noqa: BLE001 - the relay was quicker
                pid = (await outbox.wal.status()).active_pid
                if pid is not None:
                    await execute(outbox, f"SELECT pg_terminate_backend({pid})")
                await asyncio.sleep(0.02)
            else:
                return
