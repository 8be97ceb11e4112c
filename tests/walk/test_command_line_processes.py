"""`outbox relay` and `outbox worker`: their lives as processes, and the codes they end with."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from datetime import datetime
from pathlib import Path

import pytest

from outbox import Outbox
from outbox.cli.exits import ExitCode
from tests.support.commands import SOON, Command, broken, in_state, line_of, until

CANARY = "canary-7hX2"


async def test_a_worker_lets_its_listeners_end_and_ends_with_0(application: Command, outbox: Outbox) -> None:
    async with outbox.transaction() as session:
        await outbox.emit(session, "short", {})
    with application.started("worker", "application:everything") as worker:
        assert await asyncio.to_thread(line_of, worker) == "began"
        worker.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(line_of, worker) == "ended"
        stdout, log = await asyncio.to_thread(worker.communicate, timeout=SOON)
    assert (worker.returncode, stdout) == (0, "")
    assert "INFO outbox: worker started: transport database, queues short, long" in log
    assert "INFO outbox: handled short" in log and "INFO outbox: worker stopped" in log
    assert await outbox.messages() == []


async def test_a_second_signal_ends_a_worker_with_130_and_its_message_is_tried_again(
    application: Command, outbox: Outbox
) -> None:
    async with outbox.transaction() as session:
        await outbox.emit(session, "long", {})
    with application.started("worker", "application:long", OUTBOX_GRACE="1h") as worker:
        assert await asyncio.to_thread(line_of, worker) == "began"
        await until(lambda: worker.send_signal(signal.SIGINT) or worker.poll() is not None)
        assert worker.returncode == ExitCode.FORCED
    [message] = await outbox.messages()
    assert (message.state, message.attempt_count, message.crash_count) == ("queued", 0, 0)


@pytest.mark.parametrize("listener", ["long", "in_a_thread", "waits_for_a_thread", "stubborn"])
async def test_a_listener_that_outlasts_the_grace_is_abandoned_and_the_process_ends_with_5(
    sqlite_application: Command, sqlite_outbox: Outbox, listener: str
) -> None:
    outbox = sqlite_outbox
    async with outbox.transaction() as session:
        await outbox.emit(session, "long", {})
    with sqlite_application.started("worker", f"application:{listener}", OUTBOX_GRACE="100ms") as worker:
        assert await asyncio.to_thread(line_of, worker) == "began"
        worker.send_signal(signal.SIGTERM)
        _, log = await asyncio.to_thread(worker.communicate, timeout=SOON)
    assert worker.returncode == ExitCode.ABANDONED, log
    assert "WARNING outbox:" in log


async def test_a_worker_and_a_relay_log_in_json_with_ids_as_fields(
    sqlite_application: Command, sqlite_outbox: Outbox
) -> None:
    outbox = sqlite_outbox
    async with outbox.transaction() as session:
        message = await outbox.emit(session, "short", {})
    assert message is not None
    with sqlite_application.started("worker", "application:short", "--log-format", "json") as worker:
        assert await asyncio.to_thread(line_of, worker) == "began"
        worker.send_signal(signal.SIGTERM)
        _, log = await asyncio.to_thread(worker.communicate, timeout=SOON)
    started, *_, handled, stopped = [json.loads(line) for line in log.splitlines()]
    assert (started["event"], stopped["event"], stopped["what"]) == ("started", "stopped", "worker")
    assert (handled["event"], handled["message_id"], handled["queue"]) == ("handled", message.id, "short")
    assert datetime.fromisoformat(handled["time"]).tzinfo is not None
    with sqlite_application.started("relay", "--log-format", "json") as relay:
        assert relay.stderr is not None
        assert json.loads(await asyncio.to_thread(relay.stderr.readline))["event"] == "started"


async def test_a_relay_routes_until_a_signal_and_ends_with_0(command: Command, outbox: Outbox) -> None:
    await outbox.create_tables()
    await outbox.store.queues.bind([broken.binding])
    with command.started("relay", "--log-level", "debug") as relay:
        async with outbox.transaction() as session:
            await outbox.emit(session, "order.created", {"id": 1})
        await until(lambda: in_state(outbox, "queued", 1))
        relay.send_signal(signal.SIGTERM)
        _, log = await asyncio.to_thread(relay.communicate, timeout=SOON)
    assert relay.returncode == 0
    assert re.search("DEBUG outbox: routed 1 .* to broken", log) and "INFO outbox: relay stopped" in log


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
        ("application:number", ExitCode.CONFIGURATION, "is an int, not a Listener"),
        (
            "application:plain",
            ExitCode.CONFIGURATION,
            "item 1 of application:plain is a function: decorate it with",
        ),
        ("application.py:listeners", ExitCode.USAGE, "is a file: name the module, application:listeners"),
        ("./app/application.py", ExitCode.USAGE, "name the module, app.application"),
        ("application:nothing", ExitCode.CONFIGURATION, "at least one listener"),
    ],
)
async def test_a_worker_says_in_one_line_what_is_wrong_with_its_target(
    sqlite_application: Command, target: str, code: ExitCode, words: str
) -> None:
    ran = sqlite_application.process("worker", target)
    assert (ran.code, ran.stdout) == (code, "")
    assert words in ran.stderr
    assert ran.error_lines == 1


async def test_a_module_that_fails_is_shown_where_it_fails_but_not_its_credentials(sqlite_command: Command) -> None:
    module = (
        f'url = "postgresql://shop:{CANARY}@db/shop"\n\ndef boom():\n    raise ValueError("no: " + url)\n\nboom()\n'
    )
    (sqlite_command.folder / "failing.py").write_text(module)
    ran = sqlite_command.process("worker", "failing:listeners")
    assert ran.code == ExitCode.CONFIGURATION
    assert 'failing.py", line 4, in boom' in ran.stderr and "ValueError: no: postgresql://***@db/shop" in ran.stderr
    assert "importlib" not in ran.stderr and CANARY not in ran.said


async def test_a_worker_of_another_transport_is_refused_in_one_line(application: Command, outbox: Outbox) -> None:
    await outbox.store.maintenance.record_transport("rabbitmq")
    ran = application.process("worker", "application:everything")
    assert (ran.code, ran.error_lines) == (ExitCode.CONFIGURATION, 1)
    assert "outbox tables switch-transport database" in ran.stderr and "Traceback" not in ran.stderr
