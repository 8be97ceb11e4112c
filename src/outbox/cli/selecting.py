"""Selecting: the options by which commands choose among dead letters. Each command has all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import wraps
from inspect import Parameter
from typing import Annotated, Any

import typer

from outbox.core.attempt import Reason
from outbox.core.dead_letter import Filter
from outbox.core.durations import parse_duration
from outbox.core.errors import TimeInvalid


def time_of(text: str) -> datetime:
    """`2h` is two hours ago; anything else is a time in ISO 8601, in UTC unless it says otherwise."""
    if text.strip()[-1:].islower():  # a number alone might be a date as well
        with suppress(TimeInvalid, OverflowError):
            return datetime.now(UTC) - parse_duration(text)
    try:
        found = datetime.fromisoformat(text.strip())
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is no time: write for example 2h, which is two hours ago, or 2026-01-31T12:00Z"
        ) from None


_Time = datetime | None
_OPTIONS: dict[str, Any] = {
    "queue": Annotated[
        str | None,
        typer.Option(help="Only dead letters of this queue. An empty string: messages that never reached one."),
    ],
    "reason": Annotated[Reason | None, typer.Option(help="Only those that died for this reason.")],
    "error": Annotated[str | None, typer.Option(help="Only those whose error contains this text.")],
    "routing_key": Annotated[str | None, typer.Option(help="Only those with this routing key.")],
    "since": Annotated[
        _Time,
        typer.Option(
            parser=time_of, metavar="TIME", help="Only those that died at this time or later: 2h is two hours ago."
        ),
    ],
    "before": Annotated[
        _Time, typer.Option(parser=time_of, metavar="TIME", help="Only those that died before this time.")
    ],
}
NAMES = ", ".join(f"--{name.replace('_', '-')}" for name in _OPTIONS)


def selecting(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command these options in place of its parameter `filter`."""

    @wraps(command)
    def selected(**arguments: Any) -> None:
        chosen = {name: arguments.pop(name) for name in _OPTIONS}
        command(filter=Filter(**chosen), **arguments)

    signature = inspect.signature(command, eval_str=True)
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in _OPTIONS.items()
    ]
    parameters: list[Parameter] = []
    for name, parameter in signature.parameters.items():
        parameters += options if name == "filter" else [parameter.replace(kind=Parameter.KEYWORD_ONLY)]
    selected.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    selected.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return selected
