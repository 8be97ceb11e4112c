"""`outbox topology`: what the listeners need at RabbitMQ, for those who provision it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from types import ModuleType
from typing import TYPE_CHECKING, Annotated
from urllib.parse import unquote, urlsplit

import typer
from rich.console import RenderableType

from outbox.cli import screen, words
from outbox.cli.exits import ExitCode, Failure
from outbox.cli.targets import ListenersName, OutboxName, find_listeners, find_outbox
from outbox.core.errors import ConfigurationError
from outbox.core.listener import Listener, check_listeners
from outbox.instance import Outbox
from outbox.settings import Settings

if TYPE_CHECKING:
    from outbox.transports.rabbitmq.provisioning import Permissions
    from outbox.transports.rabbitmq.topology import Topology


class Format(StrEnum):
    """In which words a topology can be said."""

    TABLE = "table"
    JSON = "json"
    TERRAFORM = "terraform"


OneFormat = Annotated[Format, typer.Option("--format", help="For people, as RabbitMQ's definitions, or for Terraform.")]
VirtualHost = Annotated[
    str, typer.Option("--vhost", metavar="NAME", help="The virtual host. Without it, that of the configured URL, or /.")
]
ServerVersion = Annotated[
    str,
    typer.Option(
        "--server-version",
        metavar="VERSION",
        help="RabbitMQ's version. From 4.0 on, queues need an argument that earlier ones must not have.",
        show_default=False,
    ),
]
RelayUser = Annotated[
    str, typer.Option(metavar="NAME", help="Add the permissions of this user, who relays.", show_default=False)
]
WorkerUser = Annotated[
    str, typer.Option(metavar="NAME", help="Add the permissions of this user, who works.", show_default=False)
]


def topology(
    listeners_name: ListenersName,
    chosen: OneFormat = Format.TABLE,
    vhost: VirtualHost = "",
    server_version: ServerVersion = "",
    relay_user: RelayUser = "",
    worker_user: WorkerUser = "",
    outbox_name: OutboxName = "",
) -> None:
    """Print the exchanges, queues, bindings and permissions that listeners need at RabbitMQ. Nothing is connected to.

    For example: outbox topology shop.listeners:all_listeners --format json > definitions.json, and then
    rabbitmqctl import_definitions definitions.json
    """
    listeners = find_listeners(listeners_name)
    check_listeners(listeners)
    settings = _settings(find_outbox(outbox_name))
    provisioning, found = _needed(settings, listeners, server_version)
    users = {role: user for role, user in (("relay", relay_user), ("worker", worker_user)) if user}
    place = vhost or _configured_vhost(settings.transport)
    match chosen:
        case Format.JSON:
            print(json.dumps(provisioning.definitions(found, place, users), indent=2))
        case Format.TERRAFORM:
            print(provisioning.terraform(found, place, users))
        case Format.TABLE:
            screen.show(*_tables(found, provisioning.permissions(found), users))


def _needed(settings: Settings, listeners: Sequence[Listener], version: str) -> tuple[ModuleType, Topology]:
    try:  # it loads RabbitMQ's client, which other commands do without
        from outbox.transports.rabbitmq import provisioning
        from outbox.transports.rabbitmq.topology import Names, Topology, open_ended, server_version
    except ImportError:
        line = "RabbitMQ's client is not installed: pip install 'transactional-outbox[rabbitmq]'"
        raise Failure(ExitCode.CONFIGURATION, line) from None
    number = server_version(version)
    if version and number is None:
        raise Failure(ExitCode.USAGE, f"--server-version {version}: numbers with dots between them, such as 4.1")
    policy = settings.policy("retry_delays")
    found = Topology.of(
        Names(settings.exchange_name, settings.queue_prefix),
        listeners,
        policy.known_delays() or (),
        server_version=number,
        steps=any(open_ended(listener, policy) for listener in listeners),
    )
    return provisioning, found


def _settings(outbox: Outbox) -> Settings:
    try:
        return outbox.settings
    except ConfigurationError:  # neither a database nor a broker is named, and none is needed
        return Settings.of({})


def _configured_vhost(transport: object) -> str:
    url = urlsplit(transport) if isinstance(transport, str) else None
    named = unquote(url.path[1:]) if url is not None and url.scheme in ("amqp", "amqps") else ""
    return named or "/"


def _tables(
    topology: Topology, permissions: Sequence[Permissions], users: Mapping[str, str]
) -> Iterator[RenderableType]:
    marker = [topology.marker] if topology.marker else []
    yield screen.table(("exchange", "type"), [(each.name, each.kind) for each in (*topology.exchanges, *marker)])
    yield ""
    yield screen.table(
        ("queue", "arguments"),
        [
            (queue.name, ", ".join(f"{name}={json.dumps(value)}" for name, value in queue.arguments.items()))
            for queue in topology.queues
        ],
    )
    yield ""
    yield screen.table(
        ("exchange", "routing key", "queue"),
        [(each.exchange, each.routing_key or words.NOTHING, each.queue) for each in topology.bindings],
    )
    yield ""
    yield screen.table(
        ("user", "configure", "write", "read"),
        [(users.get(each.role, each.role), each.configure, each.write, each.read) for each in permissions],
    )
