"""`outbox status` and `outbox doctor` while RabbitMQ is away, full, or silent; and what becomes of the messages."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from outbox import Listener, Outbox, Reject
from outbox.cli.exits import ExitCode
from outbox.core.events import Relayed
from outbox.testing.servers import RabbitMQ
from tests.support.commands import Command, until
from tests.support.observing import Recorder, Statements, arrival, eventually
from tests.support.outboxes import MakeOutbox

BACK_WITHIN = 3 * 5.0  # seconds after the broker's return; 5 are promised

Arrivals = asyncio.Queue[Any]


@pytest.fixture(scope="module")
def broker() -> Iterator[RabbitMQ]:
    """A RabbitMQ that may be hurt; tests tell their queues apart by name."""
    with RabbitMQ(management=False) as server:
        yield server


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    return f"sqlite+aiosqlite:///{tmp_path / 'outbox.db'}"


@pytest.fixture
def command(tmp_path: Path, database_url: str, table_name: str, broker: RabbitMQ) -> Command:
    """The command of an operator: a process that knows the settings, and nothing of the relays."""
    names = {"OUTBOX_TABLE_NAME": table_name, "OUTBOX_EXCHANGE_NAME": table_name}
    return Command(tmp_path, {"OUTBOX_DB_ENGINE_URL": database_url, "OUTBOX_TRANSPORT": broker.url, **names})


class Shop:
    """A relay and a worker at work."""

    def __init__(self, outbox: Outbox, arrivals: Arrivals, recorder: Recorder) -> None:
        self.outbox = outbox
        self.arrivals = arrivals
        self.recorder = recorder

    async def emit(self, *orders: object) -> None:
        async with self.outbox.transaction() as session:
            await self.outbox.emit_many(session, "order.created", orders)

    async def arrived(self, *orders: object) -> bool:
        """All of them came, in time, and no attempt was lost on the way; some may come twice."""
        missing = set(orders)
        async with asyncio.timeout(BACK_WITHIN):
            while missing:
                missing.discard(await arrival(self.arrivals))
        return all(event.attempt.attempt_count == 1 for event in self.recorder.of(Relayed))


@pytest.fixture
async def shop(make_outbox: MakeOutbox, table_name: str, broker: RabbitMQ) -> AsyncIterator[Shop]:
    arrivals: Arrivals = asyncio.Queue()
    recorder = Recorder()

    async def on_order(order: Any) -> None:
        arrivals.put_nowait(order)

    names = {"exchange_name": table_name, "queue_prefix": f"{table_name}."}
    outbox = make_outbox(rabbitmq_url=broker.url, observers=[recorder], **names)
    shop = Shop(outbox, arrivals, recorder)
    async with outbox.running(relay=True, listeners=[Listener("order.*", on_order, queue="orders")]):
        await shop.emit("first")
        assert await shop.arrived("first")
        yield shop


@asynccontextmanager
async def alarm(broker: RabbitMQ) -> AsyncIterator[None]:
    """The broker has too little memory, and takes no messages."""
    await asyncio.to_thread(broker.control, "set_vm_memory_high_watermark", "0")
    try:
        yield
    finally:
        await asyncio.to_thread(broker.control, "set_vm_memory_high_watermark", "0.4")


async def attempts(shop: Shop) -> list[int]:
    return [stored.attempt_count for stored in await shop.outbox.messages()]


async def line(command: Command) -> str:
    """What `status` says of the transport."""
    ran = await command.run("status", "--interval", "0")
    assert (ran.code, ran.stderr) == (0, "")
    [found] = [line for line in ran.stdout.splitlines() if line.startswith("  transport")]
    return found.removeprefix("  transport").strip()


async def test_a_broker_that_was_stopped_is_told_and_delivery_goes_on_when_it_is_back(
    shop: Shop, command: Command, broker: RabbitMQ
) -> None:
    assert await line(command) == "rabbitmq: takes messages"
    await asyncio.to_thread(broker.stop)
    try:
        await shop.emit(*range(10))
        assert await line(command) == f"rabbitmq: away: RabbitMQ at 127.0.0.1:{broker.port}: Connection refused"
        ran = await command.run("status", "--interval", "0", "--json")
        assert "away" in ran.document["transport"]["trouble"]
        assert ran.document["waiting"] == 10
        assert ran.document["dead"] is None, "unknown, and not 0"
        [queue] = ran.document["queues"]
        assert {queue[name] for name in ("queued", "retrying", "leased", "dead", "consumers")} == {None}
        assert re.search(r"^\S+\.orders +rabbitmq( +unknown){7}$", (await command.run("queues", "list")).stdout, re.M)
        assert "guest" not in ran.said
        await until(lambda: _nothing_leased(shop))
        with Statements() as statements:
            assert (await command.run("doctor")).code == ExitCode.UNHEALTHY
        assert [each for each in statements if each.startswith("UPDATE")] == []
        assert await attempts(shop) == [0] * 10
    finally:
        await asyncio.to_thread(broker.start)
    assert await shop.arrived(*range(10))
    assert await line(command) == "rabbitmq: takes messages"


async def _nothing_leased(shop: Shop) -> bool:
    return not (await shop.outbox.store.inspection.backlog()).leased


async def test_a_broker_with_an_alarm_is_told_and_delivery_goes_on_when_it_is_over(
    shop: Shop, command: Command, broker: RabbitMQ
) -> None:
    async with alarm(broker):
        await shop.emit(*range(10))
        await shop.emit(*range(10, 20))
        assert await line(command) == "rabbitmq: takes no messages: low on memory"
        ran = await command.run("doctor", "--json")
        assert ran.code == ExitCode.UNHEALTHY
        assert [each["what"] for each in ran.document["findings"] if each["level"] == "error"] == [
            "takes no messages: low on memory"
        ]
        assert ran.stderr == ""
        assert await attempts(shop) == [0] * 20
    assert await shop.arrived(*range(20))
    assert await line(command) == "rabbitmq: takes messages"


async def test_looking_again_and_again_sees_an_alarm_come_and_go(command: Command, broker: RabbitMQ) -> None:
    assert (await command.run("tables", "create")).code == 0
    with command.started("status", "--watch", "--interval", "0.1", "--json") as process:
        assert await _until_it_says(process, None)
        async with alarm(broker):
            assert await _until_it_says(process, "takes no messages: low on memory")
        assert await _until_it_says(process, None)
        process.send_signal(signal.SIGTERM)
        _, said = await asyncio.to_thread(process.communicate)
    assert (process.returncode, said) == (0, "")


async def _until_it_says(process: subprocess.Popen[str], trouble: str | None) -> bool:
    assert process.stdout is not None
    stdout = process.stdout

    async def says() -> bool:
        look = json.loads(await asyncio.to_thread(stdout.readline))
        return bool(look["transport"]["trouble"] == trouble)

    return await eventually(says)


async def test_looking_brings_no_message_to_anybody_and_needs_no_right(
    shop: Shop, command: Command, broker: RabbitMQ
) -> None:
    everything: Arrivals = asyncio.Queue()

    async def on_anything(body: Any) -> None:
        everything.put_nowait(body)

    await asyncio.to_thread(broker.control, "add_user", "looker", "secret")
    await asyncio.to_thread(broker.control, "set_permissions", "looker", "^$", "^$", "^$")
    looker = str(URL(broker.url).with_user("looker").with_password("secret"))
    async with shop.outbox.running(listeners=[Listener("#", on_anything, queue="everything")]):
        ran = await command.run("status", "--interval", "0.1", "--json", OUTBOX_TRANSPORT=looker)
        assert ran.document["transport"] == {"name": "rabbitmq", "trouble": None}
        await shop.emit("second")
        assert await arrival(everything) == "second"


async def test_messages_and_dead_letters_at_the_broker_are_counted(
    make_outbox: MakeOutbox, command: Command, table_name: str, broker: RabbitMQ
) -> None:
    async def reject(order: Any) -> None:
        raise Reject("no such order")

    command.settings["OUTBOX_QUEUE_PREFIX"] = f"{table_name}."
    outbox = make_outbox(rabbitmq_url=broker.url, exchange_name=table_name, queue_prefix=f"{table_name}.", observers=[])
    async with outbox.transaction() as session:
        await outbox.emit_many(session, "order.created", range(2))
    async with outbox.running(relay=True, listeners=[Listener("order.*", reject, queue="orders")]):
        await eventually(lambda: _counts(outbox, consumers=1, dead=2))
    async with outbox.running(relay=True):
        async with outbox.transaction() as session:
            await outbox.emit_many(session, "order.created", range(3))
        await eventually(lambda: _counts(outbox, consumers=0, queued=3, dead=2))
    found = await outbox.backlog()
    assert (found.dead, found.dead_by_reason) == (2, {"unknown": 2})
    document = (await command.run("status", "--json", "--interval", "0")).document
    [queue] = document["queues"]
    assert (document["dead"], queue["queue"], queue["transport"]) == (2, "orders", "rabbitmq")
    assert document["leased"] is None, "AMQP does not tell what workers hold"
    assert (queue["queued"], queue["dead"], queue["consumers"]) == (3, 2, 0)
    assert (queue["leased"], queue["retrying"], queue["oldest"], queue["binding_keys"]) == (None, None, None, None)
    listed = (await command.run("queues", "list")).stdout
    assert re.search(r"^orders +rabbitmq +0 +unknown +3 +unknown +unknown +2 +unknown$", listed, re.M)
    assert (await command.run("queues", "list", "--json")).document["queues_known"] is True
    shown = (await command.run("status", "--interval", "0")).stdout
    assert re.search(r"^  leased +unknown$", shown, re.M)
    assert re.search(r"^  dead +2 \(2 unknown\), see outbox dead-letters list$", shown, re.M)
    said = (await command.run("messages", "list")).stdout
    assert "handed to rabbitmq" in said and "outbox queues list" in said and "handled" not in said
    ran = await command.run("doctor", "--json")
    told = [each["what"] for each in ran.document["findings"] if each["level"] == "error"]
    assert f"no worker consumes '{table_name}.orders', 3 waiting" in told
    assert [what for what in told if "in the queue 'orders'" in what] == [
        "2 in the queue 'orders', in the last 1h: 2 rejected"
    ]
    fine = {each["what"] for each in ran.document["findings"] if each["subject"] == "dead letters"} - set(told)
    assert fine == {"none of relays in the last 1h"}


async def _counts(outbox: Outbox, **numbers: object) -> bool:
    """A quorum queue tells its length a few seconds later."""
    return any(
        all(getattr(queue, name) == number for name, number in numbers.items())
        for queue in (await outbox.backlog()).queues
    )


async def test_where_no_queue_is_known_the_dead_letters_are_unknown(
    make_outbox: MakeOutbox, broker: RabbitMQ, command: Command
) -> None:
    outbox = make_outbox(rabbitmq_url=broker.url)
    await outbox.create_tables()
    found = await outbox.backlog()
    assert (found.dead, found.leased, found.queues) == (None, None, ())
    for words in (["queues", "list"], ["status", "--interval", "0"]):
        said = (await command.run(*words)).stdout
        assert "the queues of rabbitmq are not known: " in said and "rabbitmq_management_url" in said
        assert "no queue in the database" not in said
    assert (await command.run("queues", "list", "--json")).document == {"queues": [], "queues_known": False}


async def test_retries_that_wait_at_the_broker_are_rows_of_their_delays(
    make_outbox: MakeOutbox, command: Command, table_name: str, broker: RabbitMQ
) -> None:
    async def fail(order: Any) -> None:
        raise ValueError("not now")

    outbox = make_outbox(rabbitmq_url=broker.url, exchange_name=table_name, retry_delays=(600,), observers=[])
    listeners = [
        Listener("order.*", fail, queue=f"{table_name}.usual"),
        Listener("order.*", fail, queue=f"{table_name}.own", retry_delays=(1200,)),
    ]
    async with outbox.running(relay=True, listeners=listeners):
        async with outbox.transaction() as session:
            await outbox.emit_many(session, "order.created", range(2))
        for delay in ("600s", "1200s"):
            await eventually(partial(_counts, outbox, queue=f"{table_name}.delay_{delay}", retrying=2))
        rows = {each.queue.removeprefix(f"{table_name}."): each for each in (await outbox.backlog()).queues}
    assert set(rows) == {"usual", "own", "delay_600s", "delay_1200s"}
    assert {row.transport for row in rows.values()} == {"rabbitmq"}
    assert (rows["usual"].retrying, rows["delay_600s"].queued, rows["delay_600s"].consumers) == (None, 0, None)
    command.settings["OUTBOX_RETRY_DELAYS"] = "600"
    listed = (await command.run("queues", "list")).stdout
    assert re.search(rf"^{table_name}\.delay_600s +rabbitmq +- +- +0 +2 +0 +0 +-$", listed, re.M)


async def test_a_broker_that_refuses_the_user_or_says_nothing_is_told(
    shop: Shop, command: Command, broker: RabbitMQ
) -> None:
    command.settings["OUTBOX_TRANSPORT"] = str(URL(broker.url).with_password("wrong"))
    assert "rabbitmq: refuses us: " in await line(command)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        command.settings["OUTBOX_TRANSPORT"] = f"amqp://guest:guest@127.0.0.1:{silent.getsockname()[1]}/"
        assert await line(command) == "rabbitmq: away: no answer within 3 s"


async def test_of_transports_that_cannot_be_asked_nothing_is_said(sqlite_command: Command) -> None:
    assert (await sqlite_command.run("tables", "create")).code == 0
    ran = await sqlite_command.run("status", "--interval", "0")
    assert "transport" not in ran.stdout
    assert (await sqlite_command.run("status", "--interval", "0", "--json")).document["transport"] is None
