"""RabbitMQ for tests: the life of a private broker, and virtual hosts that share one."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import aio_pika
import pytest
from aio_pika.exceptions import AMQPError, ChannelClosed
from pamqp.common import FieldTable

from outbox.testing.servers import GivenServer, ServerFailed, ServerMissing, rabbitmq
from outbox.testing.servers.ladder import installed
from outbox.testing.servers.private_server import descendants
from outbox.testing.servers.rabbitmq_server import RabbitMQ
from tests.support.broker import VirtualHost
from tests.unit.folders import LONG, wait_until_empty

pytestmark = pytest.mark.servers

QUORUM: FieldTable = {"x-queue-type": "quorum"}


async def put(url: str, body: bytes) -> None:
    """Put a message into a quorum queue, and hear that it is safe."""
    async with await aio_pika.connect(url) as connection, connection.channel() as channel:
        await channel.declare_queue("facts", durable=True, arguments=QUORUM)
        message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        await channel.default_exchange.publish(message, "facts", timeout=LONG)


async def get(url: str) -> bytes | None:
    """Take a message out of it."""
    async with await aio_pika.connect(url) as connection, connection.channel() as channel:
        queue = await channel.declare_queue("facts", durable=True, arguments=QUORUM)
        message = await queue.get(no_ack=True, fail=False, timeout=LONG)
        return message.body if message else None


def is_listening(url: str) -> bool:
    address = urlsplit(url)
    with socket.socket() as probe:
        return probe.connect_ex((address.hostname, address.port)) == 0


def listening_addresses(process_ids: list[int]) -> set[str]:
    """The addresses on which these processes wait for connections, as the kernel writes them."""
    files = [file for id in process_ids for file in Path(f"/proc/{id}/fd").iterdir()]
    sockets = {str(file.readlink()) for file in files if file.is_symlink()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    listening = {f"socket:[{words[9]}]": words[1].partition(":")[0] for words in lines if words[3] == "0A"}
    return {listening[found] for found in sockets & listening.keys()}


def test_a_broker_named_by_its_variable_is_taken_before_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_TEST_RABBITMQ_URL", "amqp://somebody:secret@elsewhere/")
    with rabbitmq() as server:
        assert server == GivenServer("amqp://somebody:secret@elsewhere/", "named by OUTBOX_TEST_RABBITMQ_URL")


def test_without_a_broker_the_error_names_all_that_was_tried_and_what_to_install() -> None:
    with pytest.raises(ServerMissing) as raised:
        RabbitMQ(ladder=[installed("no-such-program", folders="/no/such/folder")])
    assert str(raised.value).splitlines()[:2] == [
        "no RabbitMQ for the tests:",
        "  - installed: neither /no/such/folder nor the PATH has no-such-program",
    ]
    for advice in ("apt-get install rabbitmq-server", "OUTBOX_TEST_RABBITMQ_URL="):
        assert advice in str(raised.value)


async def test_a_broker_that_was_stopped_or_killed_starts_again_on_the_same_data(reachable: Path) -> None:
    with RabbitMQ(management=False) as broker:
        url = broker.url
        await put(url, b"confirmed before the stop")
        broker.stop()
        broker.stop()
        assert not is_listening(url)
        broker.start()
        broker.start()
        assert broker.url == url
        assert await get(url) == b"confirmed before the stop"

        await put(url, b"confirmed before the kill")
        broker.kill()
        assert not is_listening(url)
        broker.start()
        assert await get(url) == b"confirmed before the kill"
        assert await get(url) is None
    wait_until_empty(reachable)


def test_a_broker_is_reached_from_this_machine_only_and_obeys_rabbitmqctl(reachable: Path) -> None:
    with RabbitMQ(settings={"channel_max": "77"}) as broker:
        assert broker._process is not None
        addresses = listening_addresses([broker._process.pid, *descendants(broker._process.pid)])
        assert addresses == {"0100007F", "00000000000000000000000001000000"}  # 127.0.0.1 and ::1
        assert broker.control("eval", "application:get_env(rabbit, channel_max).").strip() == "{ok,77}"
        with pytest.raises(ServerFailed, match="rabbitmqctl ended with code 64"):
            broker.control("no-such-command")
    wait_until_empty(reachable)


def test_a_broker_that_cannot_start_says_why_and_leaves_nothing_behind(reachable: Path) -> None:
    with pytest.raises(ServerFailed, match="no_such_setting"):
        RabbitMQ(settings={"no_such_setting": "1"}).__enter__()
    wait_until_empty(reachable)


def test_a_broker_ends_with_the_process_that_started_it(reachable: Path) -> None:
    command = [sys.executable, "-m", "outbox.testing.servers", "rabbitmq"]
    environment = {name: value for name, value in os.environ.items() if name != "OUTBOX_TEST_RABBITMQ_URL"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        how, url = process.stdout.readline().strip(), process.stdout.readline().strip()
        assert how.startswith(("programs ", "Debian packages "))
        assert is_listening(url)
        process.kill()
        assert process.wait(LONG) == -signal.SIGKILL
    wait_until_empty(reachable)
    deadline = time.monotonic() + LONG
    while is_listening(url):  # its last threads may outlive its folder by a moment
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_virtual_hosts_do_not_see_each_other(vhost: VirtualHost, rabbitmq_url: str) -> None:
    assert vhost.url == rabbitmq_url
    other = VirtualHost(vhost.management.server, f"{vhost.name}-other")
    other.create()
    await put(other.url, b"elsewhere")
    assert "facts" in other.queues()
    assert vhost.queues() == {} == vhost.exchanges()
    assert await get(vhost.url) is None
    other.delete()
    with pytest.raises(AMQPError):
        await get(other.url)


async def test_a_user_of_a_virtual_host_may_do_what_it_was_permitted(vhost: VirtualHost) -> None:
    await put(vhost.url, b"for a reader")
    url = vhost.url_of_user(read="^facts$")
    async with await aio_pika.connect(url) as connection:
        async with connection.channel() as channel:
            message = await (await channel.get_queue("facts", ensure=False)).get(no_ack=True)
            assert message is not None and message.body == b"for a reader"
        async with connection.channel() as channel:
            with pytest.raises(ChannelClosed, match="ACCESS_REFUSED"):
                await channel.declare_queue("another", durable=True)
