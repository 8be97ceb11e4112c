"""`outbox topology`: what the listeners need at RabbitMQ, for those who provision it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import RenderableType

from outbox.adapters import defaults_of, transport_for
from outbox.cli import screen, words
from outbox.cli.exits import ExitCode, Failure
from outbox.cli.logs import hush_clients
from outbox.cli.targets import ListenersName, OutboxName, find_listeners, find_outbox
from outbox.core.errors import ConfigurationError, TransportUnavailable
from outbox.core.listener import check_listeners
from outbox.core.store import IN_DATABASE
from outbox.core.transport import Provisioning, Transport
from outbox.instance import Outbox
from outbox.settings import Settings

USUAL = "amqp://localhost/"  # whose transport is asked where the configured one has nothing to provision

_VERSION = re.compile(r"\d+(\.\d+)*")


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
        help="RabbitMQ's version: from 4.0 on, queues need an argument that earlier ones must not have. Without it, "
        "the configured broker is asked.",
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
    """Print the exchanges, queues, bindings and permissions that listeners need at RabbitMQ. Nothing is made there.

    For example: outbox topology shop.listeners:all_listeners --format json > definitions.json, and then
    rabbitmqctl import_definitions definitions.json. With --server-version nothing is connected to.
    """
    listeners = find_listeners(listeners_name)
    check_listeners(listeners)
    if server_version and _VERSION.match(server_version) is None:
        raise Failure(ExitCode.USAGE, f"--server-version {server_version}: numbers with dots between them, such as 4.1")
    transport, is_configured = _transport(find_outbox(outbox_name))
    found = transport.topology(
        listeners,
        virtual_host=vhost,
        server_version=server_version or _told_by(transport, is_configured),
        users={role: user for role, user in (("relay", relay_user), ("worker", worker_user)) if user},
    )
    match chosen:
        case Format.JSON:
            print(json.dumps(found.definitions, indent=2))
        case Format.TERRAFORM:
            print(found.terraform)
        case Format.TABLE:
            screen.show(*_tables(found))


def _told_by(transport: Transport, is_configured: bool) -> str:
    """The version of the configured broker: what is printed for another one would lose messages."""
    hush_clients()
    try:
        version = asyncio.run(transport.server_version()) if is_configured else ""
    except (TransportUnavailable, TimeoutError) as error:
        away = str(error) or "the broker does not answer"
        raise Failure(ExitCode.UNREACHABLE, f"{away}; with --server-version it need not be asked") from None
    if not version:
        raise Failure(
            ExitCode.USAGE,
            "--server-version is missing, such as --server-version 4.1, and no broker is configured that could tell. "
            "From RabbitMQ 4.0 on queues need x-delivery-limit=-1: without it a message is dead-lettered after 21 lost "
            "connections. Before 4.0 the same argument dead-letters every message that comes back",
        )
    return version


def _transport(outbox: Outbox) -> tuple[Transport, bool]:
    """The configured one, if it describes its topology, and whether it is that. Nothing needs to be configured."""
    try:
        settings = outbox.settings
    except ConfigurationError:
        settings = Settings.of({})
    defaults = defaults_of(settings, lambda event: None)
    if settings.transport not in (None, IN_DATABASE):
        transport = transport_for(settings.transport, defaults)
        if transport.features.describes_topology:
            return transport, True
    return transport_for(USUAL, defaults), False


def _tables(found: Provisioning) -> Iterator[RenderableType]:
    for number, (headings, rows) in enumerate(found.tables):
        if number:
            yield ""
        yield screen.table(headings, [tuple(cell or words.NOTHING for cell in row) for row in rows])
