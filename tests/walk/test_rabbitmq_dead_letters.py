"""Dead letters on RabbitMQ: looked at without a trace, replayed without a loss, by programs and by commands."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiormq
import pytest
from aiormq.abc import AbstractChannel
from pamqp.commands import Basic
from pamqp.common import FieldTable
from yarl import URL

from outbox import Message, Outbox, Reject, listen
from outbox.cli.exits import ExitCode
from outbox.core.attempt import Dead, Done, Reason
from outbox.core.dead_letter import FIRST_OF_QUEUES, DeadLetter
from outbox.core.errors import ConfigurationError
from outbox.core.message import NOW
from outbox.core.transport import Defaults
from outbox.testing.servers import RabbitMQ
from outbox.testing.transport.cases import consuming, emptied, listener, take
from outbox.transports.rabbitmq import RabbitmqTransport
from outbox.transports.rabbitmq.confirms import BrokerAnswer, Outgoing
from outbox.transports.rabbitmq.dead_letters import RENEWED_AFTER
from outbox.transports.rabbitmq.frames import FrameConnection
from outbox.transports.rabbitmq.management import management_url_of
from outbox.transports.rabbitmq.topology import LONGEST_DELAY, Names
from tests.support.amqp import channel_to, has_rejected
from tests.support.broker import VirtualHost
from tests.support.commands import Command, until

LIMIT = RENEWED_AFTER + 2


@pytest.fixture
async def transport(rabbitmq_url: str) -> AsyncIterator[RabbitmqTransport]:
    """One whose queue `q` exists."""
    transport = RabbitmqTransport(rabbitmq_url)
    await transport.open()
    await transport.declare([listener()])
    yield transport
    await transport.close()


@pytest.fixture
async def limited(rabbitmq_url: str) -> None:
    """For tests whose `q.dlq` drops what comes back too often, as one that RabbitMQ 4 found there would."""
    async with channel_to(rabbitmq_url) as channel:
        arguments: FieldTable = {"x-queue-type": "quorum", "x-delivery-limit": LIMIT}
        await channel.queue_declare("q.dlq", durable=True, arguments=arguments)


@pytest.fixture
def management_url(vhost: VirtualHost) -> str:
    server = vhost.management.server
    return server.management_url if isinstance(server, RabbitMQ) else management_url_of(server.url)


@pytest.fixture
def command(tmp_path: Path, vhost: VirtualHost, management_url: str) -> Command:
    """`outbox …` with a broker and no database."""
    return Command(tmp_path, {"OUTBOX_TRANSPORT": vhost.url, "OUTBOX_RABBITMQ_MANAGEMENT_URL": management_url})


async def bury(url: str, count: int, queue: str = "q", reason: Reason = Reason.REJECTED) -> None:
    """Dead letters as a worker writes them, one a microsecond, without the time that a worker takes."""
    died_at = round(datetime.now(UTC).timestamp() * 1_000_000)

    def properties(number: int) -> Basic.Properties:
        headers: FieldTable = {
            "outbox-created-at": died_at,
            "outbox-died-at": died_at + number,
            "outbox-routing-key": "order.created",
            "outbox-reason": str(reason),
            "outbox-error": f"error {number}",
            "outbox-attempt": 3,
            "outbox-crashes": 2,
            "outbox-expires-at": died_at,
        }
        return Basic.Properties(message_id=f"{queue}-{number}", headers=headers, delivery_mode=2)

    letters = [
        Outgoing("outbox.dlx", queue, properties(number).marshal(), f"{number}".encode(), f"{queue}-{number}")
        for number in range(count)
    ]
    wire = await FrameConnection.connect(URL(url), "a worker")
    assert set(await (await wire.channel()).publish(letters, 60.0)) == {BrokerAnswer.CONFIRMED}
    await wire.close()


async def lying(url: str, queue: str) -> list[tuple[str | None, bool]]:
    """The ids of all messages of a queue, and whether each was given back before. They go back once more."""
    async with channel_to(url) as channel:
        found = []
        count = (await channel.queue_declare(queue, passive=True)).message_count or 0
        everything = asyncio.Event()

        async def on_message(each: aiormq.abc.DeliveredMessage) -> None:
            found.append((each.header.properties.message_id, bool(each.redelivered)))
            if len(found) == count:
                everything.set()

        if count:
            await channel.basic_qos(prefetch_count=count)
            await channel.basic_consume(queue, on_message)
            async with asyncio.timeout(60):
                await everything.wait()
        return found


def numbers(letters: list[DeadLetter]) -> list[int]:
    return [int(letter.message.body) for letter in letters]


# Looking.


async def test_looking_again_and_again_costs_nothing_even_where_the_queue_has_a_limit(
    limited: None, transport: RabbitmqTransport, rabbitmq_url: str
) -> None:
    await bury(rabbitmq_url, 10)
    first = await transport.dead_letters.list()
    assert numbers(first) == list(range(10))
    for _ in range(3 * LIMIT):
        assert await transport.dead_letters.list() == first
    for _ in range(LIMIT):
        assert await transport.dead_letters.show(first[-1].id) == first[-1]
    assert await transport.dead_letters.list() == first


async def test_a_short_list_of_many_takes_only_what_it_shows(transport: RabbitmqTransport, rabbitmq_url: str) -> None:
    await bury(rabbitmq_url, 10_000)
    for _ in range(2):
        assert numbers(await transport.dead_letters.list(limit=100)) == list(range(100))
    touched = sum(redelivered for _, redelivered in await lying(rabbitmq_url, "q.dlq"))
    assert 100 <= touched <= 101
    await until(lambda: _counts(transport, 10_000))
    for _ in range(2):
        assert numbers(await transport.dead_letters.list(limit=100)) == list(range(100))
    [page] = [await transport.dead_letters.list(limit=50, after=(await transport.dead_letters.list(limit=7))[-1].id)]
    assert numbers(page) == list(range(7, 57))


async def _counts(transport: RabbitmqTransport, count: int) -> bool:
    return len(await transport.dead_letters.list(limit=count)) == count


async def test_letters_of_several_queues_are_listed_together_and_by_queue(
    transport: RabbitmqTransport, rabbitmq_url: str
) -> None:
    await transport.declare([listener("other")])
    await bury(rabbitmq_url, 3)
    await bury(rabbitmq_url, 3, "other", Reason.EXPIRED)
    letters = transport.dead_letters
    assert [letter.queue for letter in await letters.list()] == ["q"] * 3 + ["other"] * 3
    assert [letter.queue for letter in await letters.list(queue="other", limit=2)] == ["other"] * 2
    assert numbers(await letters.list(reason=Reason.EXPIRED, error="error 2")) == [2]
    assert await letters.list(queue="there is none") == []


async def test_a_queue_prefix_is_part_of_the_broker_and_not_of_the_letter(rabbitmq_url: str) -> None:
    transport = RabbitmqTransport(rabbitmq_url, Defaults(settings={"queue_prefix": "eu."}))
    await transport.open()
    await transport.declare([listener()])
    await bury(rabbitmq_url, 1, "eu.q")
    [letter] = await transport.dead_letters.list()
    assert letter.queue == "q"
    assert await transport.dead_letters.replay([letter.id]) == 1
    assert len(await emptied(transport)) == 1
    await transport.close()


@pytest.mark.parametrize("by_hand", [True, False])
async def test_looking_often_takes_no_more_numbers_for_channels(rabbitmq_url: str, by_hand: bool) -> None:
    transport = RabbitmqTransport(rabbitmq_url, by_hand=by_hand)
    await transport.open()
    await transport.declare([listener()])
    for _ in range(20):
        await transport.dead_letters.list()
    wire = await transport._consumer_connection.connection()
    assert (await wire.client_channel()).number < 10
    await transport.close()


# Letters that somebody else made.


async def test_what_the_broker_itself_moved_is_told_with_what_it_knows_and_can_be_replayed(
    limited: None, rabbitmq_url: str
) -> None:
    async with channel_to(rabbitmq_url) as channel:
        arguments: FieldTable = {
            "x-queue-type": "quorum",
            "x-delivery-limit": 1,
            "x-dead-letter-exchange": "outbox.dlx",
            "x-dead-letter-routing-key": "q",
        }
        await channel.queue_declare("q", durable=True, arguments=arguments)
        transport = RabbitmqTransport(rabbitmq_url)
        await transport.open()
        await transport.declare([listener()])
        for body in (b"rejected", b"limit"):
            await channel.basic_publish(
                body, exchange="outbox", routing_key="order.created", properties=Basic.Properties(headers={"a": "b"})
            )
        await until(lambda: has_rejected(channel, "q"))
        for _ in range(2):
            await until(lambda: _has_given_back(channel))
    letters = {letter.message.body: letter for letter in await until(lambda: _so_many(transport, 2))}
    rejected, limit = letters[b"rejected"], letters[b"limit"]
    assert (rejected.reason, limit.reason) == (Reason.REJECTED, Reason.CRASHED)
    assert "delivery_limit" in limit.error
    for letter in (rejected, limit):
        assert (letter.queue, letter.message.routing_key, letter.message.headers) == ("q", "order.created", {"a": "b"})
        assert abs(letter.died_at - datetime.now(UTC)) < timedelta(minutes=5)
    for _ in range(2 * LIMIT):  # until copies of ours stand for them
        again = await transport.dead_letters.list()
    assert [letter.id for letter in again] == sorted(letter.id for letter in letters.values())
    assert await transport.dead_letters.replay([letter.id for letter in letters.values()]) == 2
    found = await emptied(transport, count=2)
    assert {each.id for each in found} == {letter.message.id for letter in letters.values()}
    assert {each.routing_key for each in found} == {"order.created"}
    await transport.close()


async def _has_given_back(channel: AbstractChannel) -> bool:
    got = await channel.basic_get("q")
    if not isinstance(got.delivery, Basic.GetOk):
        return False
    await channel.basic_reject(got.delivery.delivery_tag or 0, requeue=True)
    return True


async def _so_many(transport: RabbitmqTransport, count: int) -> list[DeadLetter]:
    letters = await transport.dead_letters.list()
    return letters if len(letters) == count else []


async def test_what_expires_in_its_queue_is_a_dead_letter_though_no_worker_takes_it(
    transport: RabbitmqTransport,
) -> None:
    soon, later = datetime.now(UTC) + timedelta(seconds=0.3), datetime.now(UTC) + LONGEST_DELAY
    expiring = Message(routing_key="order.created", body=b"1", headers={"a": "b"}, key="k", expires_at=soon)
    behind = [
        Message(routing_key="order.created", body=b"", expires_at=expires_at)
        for expires_at in (later, later + timedelta(days=1), None)  # none of them stops the others
    ]
    published = await transport.publish([expiring, *behind])
    assert published.confirmed == {message.id for message in (expiring, *behind)}
    async with asyncio.timeout(30):
        [letter] = await until(lambda: _so_many(transport, 1))
    assert datetime.now(UTC) >= soon
    assert (letter.message, letter.queue, letter.reason) == (expiring, "q", Reason.EXPIRED)
    assert "expired" in letter.error
    assert await transport.dead_letters.replay([letter.id]) == 1
    found = {message.id: message for message in await emptied(transport, count=4)}
    assert found.keys() == {message.id for message in (expiring, *behind)}
    assert found[expiring.id].expires_at is None


async def test_what_a_stranger_put_there_is_listed_the_same_at_every_look_and_can_be_replayed(
    transport: RabbitmqTransport, rabbitmq_url: str
) -> None:
    async with channel_to(rabbitmq_url) as channel:
        for body, properties in (
            (b"bare", Basic.Properties()),
            (b"false", Basic.Properties(message_id="m", headers={"outbox-attempt": "many", "outbox-died-at": "today"})),
            (b"no reason", Basic.Properties(message_id="n", headers={"outbox-reason": "boredom"})),
        ):
            await channel.basic_publish(body, routing_key="q.dlq", properties=properties)
    letters = await transport.dead_letters.list()
    assert await transport.dead_letters.list() == letters
    reasons = {letter.message.body: letter.reason for letter in letters}
    assert reasons == {b"bare": Reason.REJECTED, b"false": Reason.UNDECODABLE, b"no reason": Reason.UNDECODABLE}
    assert all(letter.error for letter in letters)
    assert await transport.dead_letters.replay([letter.id for letter in letters]) == 3
    found = await emptied(transport, count=3)
    assert {each.id for each in found} == {letter.message.id for letter in letters}


async def test_what_cannot_be_read_is_listed_and_stays_until_it_is_discarded(
    limited: None, transport: RabbitmqTransport, rabbitmq_url: str
) -> None:
    header = b"\x02\xff\xfeS\x00\x00\x00\x01x"  # its name is no text
    properties = b"\x20\x00" + len(header).to_bytes(4, "big") + header
    wire = await FrameConnection.connect(URL(rabbitmq_url), "a stranger")
    channel = await wire.channel()
    assert await channel.publish([Outgoing("", "q.dlq", properties, b"strange", "")], 30.0) == [BrokerAnswer.CONFIRMED]
    await wire.close()
    await bury(rabbitmq_url, 1)
    letters = transport.dead_letters
    strange, fine = await letters.list()
    assert (strange.reason, strange.message.body) == (Reason.UNDECODABLE, b"strange")
    assert "is no UTF-8" in strange.error
    assert await letters.replay([fine.id]) == 1
    for _ in range(2 * LIMIT):
        assert [letter.id for letter in await letters.list()] == [strange.id]
    assert await letters.discard([strange.id]) == 1
    assert await letters.list() == []


# Replaying.


async def test_a_replayed_letter_keeps_its_id_and_begins_anew(transport: RabbitmqTransport, rabbitmq_url: str) -> None:
    await bury(rabbitmq_url, 1, reason=Reason.EXPIRED)
    [letter] = await transport.dead_letters.list()
    assert (letter.attempt_count, letter.crash_count) == (3, 2)
    assert letter.message.expires_at is not None
    assert await transport.dead_letters.replay([letter.id]) == 1
    async with consuming(transport) as deliveries:
        [delivery] = await take(deliveries)
        again = delivery.attempt
        assert (again.message.id, again.message.routing_key) == (letter.message.id, "order.created")
        assert (again.attempt_count, again.crash_count, again.message.expires_at) == (1, 0, None)
        await delivery.settle(Dead(Reason.REJECTED, "again"))
    [second] = await transport.dead_letters.list()
    assert second.id > letter.id
    replayed, last = second.history.splitlines()
    assert "replayed" in replayed
    assert "again" in last


async def test_two_replay_at_once_while_a_worker_buries_more(transport: RabbitmqTransport, rabbitmq_url: str) -> None:
    await bury(rabbitmq_url, 300)
    ids = [letter.id for letter in await transport.dead_letters.list(limit=300)]
    other = RabbitmqTransport(rabbitmq_url)
    first, second, _ = await asyncio.gather(
        _in_batches(transport, ids), _in_batches(other, ids, queue="q"), bury(rabbitmq_url, 50)
    )
    assert first + second == 300
    assert Counter(each for each, _ in await lying(rabbitmq_url, "q")) == Counter(f"q-{n}" for n in range(300))
    assert len(await transport.dead_letters.list(limit=300)) == 50


async def _in_batches(transport: RabbitmqTransport, ids: list[int], queue: str = "q") -> int:
    await transport.dead_letters.list(queue=queue, limit=len(ids))  # now it knows where they lie
    return sum([await transport.dead_letters.replay(ids[start : start + 30]) for start in range(0, len(ids), 30)])


DIES = """
import asyncio, os, signal, sys

from outbox.transports.rabbitmq import RabbitmqTransport
from outbox.transports.rabbitmq.dead_letters.browsing import Browse
from outbox.transports.rabbitmq.publishing import BatchPublisher


async def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


async def replay(url):
    letters = RabbitmqTransport(url).dead_letters
    ids = [letter.id for letter in await letters.list(queue="q")]
    if sys.argv[2] == "before the acknowledgement":
        Browse.remove = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    else:
        BatchPublisher.publish = die
    await letters.replay(ids)


asyncio.run(replay(sys.argv[1]))
"""


@pytest.mark.parametrize(("moment", "copies"), [("before the publish", 0), ("before the acknowledgement", 20)])
async def test_a_replay_that_is_killed_half_way_loses_nothing(
    transport: RabbitmqTransport, rabbitmq_url: str, moment: str, copies: int
) -> None:
    await bury(rabbitmq_url, 20)
    killed = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", DIES, rabbitmq_url, moment], check=False, timeout=120
    )
    assert killed.returncode == -9
    letters = await until(lambda: _so_many(transport, 20))
    assert numbers(letters) == list(range(20))
    assert len(await lying(rabbitmq_url, "q")) == copies
    assert await transport.dead_letters.replay([letter.id for letter in letters]) == 20
    found = Counter([each for each, _ in await until(lambda: _lie(rabbitmq_url, 20 + copies))])
    assert set(found) == {f"q-{number}" for number in range(20)}


async def _lie(url: str, count: int) -> list[tuple[str | None, bool]]:
    found = await lying(url, "q")
    return found if len(found) == count else []


async def test_a_command_that_is_killed_while_it_replays_leaves_every_letter_in_one_place_or_the_other(
    transport: RabbitmqTransport, rabbitmq_url: str, command: Command
) -> None:
    await bury(rabbitmq_url, 200)
    with command.started("dead-letters", "replay", "--all", "--rate", "40") as process:
        async with consuming(transport, prefetch=300) as deliveries:
            begun = await take(deliveries, 20)
            process.kill()
            await asyncio.to_thread(process.wait)
            alive = {delivery.attempt.message.id for delivery in begun}
            for delivery in begun:
                await delivery.settle(Done())
            left = await transport.dead_letters.list(limit=300)
            assert 0 < len(left) < 200
            await transport.dead_letters.replay([letter.id for letter in left])
            while len(alive) < 200:
                [delivery] = await take(deliveries)
                alive.add(delivery.attempt.message.id)
                await delivery.settle(Done())
    assert alive == {f"q-{number}" for number in range(200)}
    assert await transport.dead_letters.list() == []


async def test_a_letter_whose_queue_is_gone_stays_and_the_error_says_so(
    transport: RabbitmqTransport, rabbitmq_url: str
) -> None:
    await bury(rabbitmq_url, 1)
    async with channel_to(rabbitmq_url) as channel:
        await channel.queue_delete("q")
    [letter] = await transport.dead_letters.list()
    with pytest.raises(ConfigurationError, match="nothing at RabbitMQ takes dead letters for 'q'"):
        await transport.dead_letters.replay([letter.id])
    assert await transport.dead_letters.list() == [letter]


# Rights.


async def test_whoever_may_read_and_write_looks_and_replays_without_the_right_to_configure(
    limited: None, transport: RabbitmqTransport, rabbitmq_url: str, vhost: VirtualHost
) -> None:
    await bury(rabbitmq_url, 3)
    operator = RabbitmqTransport(vhost.url_of_user(read=r"^q\.dlq$", write=r"^(amq\.default|outbox\.dlx)$"))
    letters = await operator.dead_letters.list(queue="q")
    assert numbers(letters) == [0, 1, 2]
    assert await operator.dead_letters.replay([letters[1].id]) == 1
    assert len(await emptied(transport)) == 1
    for _ in range(2 * LIMIT):
        assert numbers(await operator.dead_letters.list(queue="q")) == [0, 2]


@pytest.mark.parametrize(
    ("rights", "told"),
    [
        ({"write": ".*"}, r"may not read the queue 'q\.dlq'"),
        ({"read": ".*"}, r"may not publish to the default exchange, amq\.default"),
    ],
)
async def test_a_right_that_is_missing_is_named_and_nothing_is_lost(
    transport: RabbitmqTransport, rabbitmq_url: str, vhost: VirtualHost, rights: dict[str, str], told: str
) -> None:
    await bury(rabbitmq_url, 1)
    [letter] = await transport.dead_letters.list()
    stranger = RabbitmqTransport(vhost.url_of_user(**rights))
    with pytest.raises(ConfigurationError, match=told):
        await stranger.dead_letters.list(queue="q")
        await stranger.dead_letters.replay([letter.id])
    assert await transport.dead_letters.list() == [letter]


# The command line, and both kinds.


async def test_the_commands_work_with_a_broker_and_no_database(
    transport: RabbitmqTransport, rabbitmq_url: str, command: Command
) -> None:
    await bury(rabbitmq_url, 4)
    listed = await command.run("dead-letters", "list", "--json", "--limit", "3")
    letters = listed.document["dead_letters"]
    assert [letter["message"]["id"] for letter in letters] == ["q-0", "q-1", "q-2"]
    assert all(int(letter["id"]) > 2**53 and isinstance(letter["id"], str) for letter in letters)  # jq would round them
    behind = await command.run("dead-letters", "list", "--json", "--after", str(listed.document["next_after"]))
    assert [letter["message"]["id"] for letter in behind.document["dead_letters"]] == ["q-3"]
    shown = await command.run("dead-letters", "show", str(letters[1]["id"]), "--body")
    assert (shown.code, "rejected, after 3 attempts" in shown.stdout) == (ExitCode.FINE, True)
    recent = ("--error", "error 2", "--since", "1h", "--routing-key", letters[2]["message"]["routing_key"])
    tried = await command.run("dead-letters", "replay", "--all", *recent, "--dry-run", "--json")
    assert (tried.document["ids"], tried.document["replayed"]) == ([letters[2]["id"]], 0)
    for others in (("--before", "1h"), ("--routing-key", "elsewhere")):
        none = await command.run("dead-letters", "discard", "--all", *others, "--yes")
        assert (none.code, none.error_lines) == (ExitCode.WRONG, 1)
    replayed = await command.run("dead-letters", "replay", "--all", *recent, "--rate", "100")
    assert replayed.stdout == "replayed 1 dead letter\n"
    assert [each.id for each in await emptied(transport)] == ["q-2"]
    discarded = await command.run("dead-letters", "discard", str(letters[0]["id"]), "--yes")
    assert discarded.stdout == "discarded 1 dead letter\n"
    again = await command.run("dead-letters", "discard", str(letters[0]["id"]), "--yes")
    assert (again.code, again.error_lines) == (ExitCode.WRONG, 1)
    assert [each["message"]["id"] for each in (await _listed(command))] == ["q-1", "q-3"]


async def _listed(command: Command) -> list[dict[str, dict[str, str]]]:
    found: list[dict[str, dict[str, str]]] = (await command.run("dead-letters", "list", "--json")).document[
        "dead_letters"
    ]
    return found


async def test_without_the_management_interface_a_queue_must_be_named(
    transport: RabbitmqTransport, rabbitmq_url: str, command: Command
) -> None:
    await bury(rabbitmq_url, 2)
    nowhere = {"OUTBOX_RABBITMQ_MANAGEMENT_URL": "http://127.0.0.1:1"}
    refused = await command.run("dead-letters", "list", **nowhere)
    assert (refused.code, refused.error_lines) == (ExitCode.CONFIGURATION, 1)
    assert "or set rabbitmq_management_url" in refused.stderr
    replayed = await command.run("dead-letters", "replay", "--all", "--queue", "q", **nowhere)
    assert replayed.stdout == "replayed 2 dead letters\n"
    assert len(await emptied(transport, count=2)) == 2


async def test_a_broker_that_is_away_is_told(command: Command) -> None:
    ran = await command.run("dead-letters", "list", "--queue", "q", OUTBOX_TRANSPORT="amqp://guest:guest@127.0.0.1:1/")
    assert (ran.code, ran.error_lines) == (ExitCode.UNREACHABLE, 1)
    assert "RabbitMQ is away" in ran.stderr


async def test_those_of_the_relay_and_those_of_the_queues_stand_side_by_side(
    tmp_path: Path, rabbitmq_url: str, command: Command
) -> None:
    @listen("order.created", queue="q")
    async def broken(order: dict[str, int]) -> None:
        raise Reject("it is wrong")

    database = f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}"
    outbox = Outbox(db_engine_url=database, rabbitmq_url=rabbitmq_url)
    async with outbox.running(relay=True, listeners=[broken]):
        async with outbox.transaction() as session:
            await outbox.emit(session, "order.created", {"id": 1})
            # As an earlier version stored it: `emit` refuses such a name.
            rerouting = Message(routing_key="order.created", body=b"{}", headers={"CC": "elsewhere"})
            connection = await session.connection()
            await connection.run_sync(outbox.store.writing.write, *outbox.store.writing.insert([rerouting], NOW))
        refused, rejected = await until(lambda: _both(outbox))
    assert (refused.reason, refused.queue) == (Reason.REFUSED, None)
    assert (rejected.reason, rejected.queue) == (Reason.REJECTED, "q")
    assert refused.id < FIRST_OF_QUEUES <= rejected.id
    letters = outbox.dead_letters
    assert [await letters.show(each.id) for each in (refused, rejected)] == [refused, rejected]
    assert await letters.list(limit=1) == [refused]
    assert await letters.list(after=refused.id) == [rejected]
    settings = {"OUTBOX_DB_ENGINE_URL": database}
    listed = await command.run("dead-letters", "list", "--json", **settings)
    assert [each["reason"] for each in listed.document["dead_letters"]] == ["refused", "rejected"]
    nowhere = settings | {"OUTBOX_RABBITMQ_MANAGEMENT_URL": "http://127.0.0.1:1"}
    of_relay = await command.run("dead-letters", "list", "--json", "--queue", "", **nowhere)
    assert [each["id"] for each in of_relay.document["dead_letters"]] == [str(refused.id)]
    assert await letters.replay([refused.id, rejected.id]) == 2
    assert await letters.list() == []
    await outbox.close()


async def _both(outbox: Outbox) -> list[DeadLetter]:
    found = await outbox.dead_letters.list()
    return found if len(found) == 2 else []


async def test_the_lock_is_the_only_thing_that_a_look_makes_and_it_is_gone_afterwards(
    transport: RabbitmqTransport, rabbitmq_url: str, vhost: VirtualHost
) -> None:
    before = set(vhost.queues())
    await bury(rabbitmq_url, 1)
    await transport.dead_letters.list()
    assert set(vhost.queues()) == before
    assert Names().dead_letter_lock not in before
