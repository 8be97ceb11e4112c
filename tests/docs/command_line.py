"""The commands of the program, as one would type them."""

from __future__ import annotations

from collections.abc import Iterator

from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from outbox.cli import app


def all_commands() -> Iterator[tuple[str, TyperCommand]]:
    """Every command, as one would type it behind `outbox`."""
    root = get_command(app)
    assert isinstance(root, TyperGroup)
    for name, command in root.commands.items():
        if isinstance(command, TyperGroup):
            yield from ((f"{name} {inner}", each) for inner, each in command.commands.items())  # type: ignore[misc]
        else:
            yield name, command  # type: ignore[misc]


def options(command: TyperCommand) -> list[str]:
    return [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
