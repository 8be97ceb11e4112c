"""`outbox doctor`: is everything as it should be, and what to do if not?"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from outbox.cli import words
from outbox.cli.asking import ask
from outbox.cli.documents import print_document
from outbox.cli.exits import ExitCode, Failure
from outbox.cli.logs import hush_clients
from outbox.cli.secrets import redacted
from outbox.cli.targets import AsJson, OutboxName, find_listeners, find_outbox
from outbox.core.diagnosis import Finding, Level
from outbox.doctor import examine

Listeners = Annotated[
    str,
    typer.Argument(
        metavar="[MODULE:ATTRIBUTE]", help="The listeners whose exchanges and queues to look at.", show_default=False
    ),
]
ManagementUrl = Annotated[
    str,
    typer.Option(
        metavar="URL",
        help="RabbitMQ's management interface. Without it, OUTBOX_RABBITMQ_MANAGEMENT_URL, or port 15672 (15671 with "
        "TLS) of the broker's host. A user and password belong in the variable: arguments are in the process list.",
        show_default=False,
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="Let warnings count as errors.")]

_WIDTH = max(map(len, Level))
_VISIBLE = (
    "--management-url with a user and password is in the process list, where every user of this machine can read it: "
    "set OUTBOX_RABBITMQ_MANAGEMENT_URL instead"
)


def doctor(
    listeners_name: Listeners = "",
    strict: Strict = False,
    management_url: ManagementUrl = "",
    as_json: AsJson = False,
    outbox_name: OutboxName = "",
) -> None:
    """Look at versions, tables, clocks, the database's health and messages that no process takes; say what to do.

    With listeners, and RabbitMQ as the transport, compare its exchanges, queues and bindings with what they need.

    Ends with 0 if all is well, and with 6 if there is an error. A warning counts only with --strict.
    """
    hush_clients()
    if "@" in management_url:
        raise Failure(ExitCode.USAGE, _VISIBLE)
    listeners = find_listeners(listeners_name) if listeners_name else ()
    outbox = find_outbox(outbox_name)
    found = ask(outbox, lambda: examine(outbox, listeners, management_url=management_url), needs_tables=False)
    findings = [replace(each, what=redacted(each.what), advice=redacted(each.advice)) for each in found]
    bad = (Level.ERROR, Level.WARNING) if strict else (Level.ERROR,)
    healthy = not any(finding.level in bad for finding in findings)
    if as_json:
        print_document({"healthy": healthy, "findings": findings})
    else:
        print("\n".join(line for finding in findings for line in _lines(finding)))
    if not healthy:
        raise typer.Exit(ExitCode.UNHEALTHY)


def _lines(finding: Finding) -> list[str]:
    told = f"{finding.level:<{_WIDTH}}  {finding.subject}: {finding.what}"
    advice = [f"{'':<{_WIDTH}}  -> {finding.advice}"] if finding.advice else []
    return [words.printable(line) for line in (told, *advice)]
