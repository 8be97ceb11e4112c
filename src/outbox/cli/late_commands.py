"""LateCommands: the commands by name, each imported when it is asked for, so that a list of them needs none."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.main import get_group


class LateCommands(dict[str, Any]):
    """What typer looks for a command in. A name leads to the module of that name in this package."""

    SHORT_HELPS: ClassVar[dict[str, str]] = {
        "relay": "Hand stored messages to the transport.",
        "worker": "Serve listeners.",
        "status": "Show how many messages wait, and where.",
        "doctor": "Say what is wrong, and what to do.",
        "topology": "Print what listeners need at RabbitMQ.",
        "demo": "Show the library at work, on SQLite.",
        "messages": "List stored messages, or show the history of one.",
        "dead-letters": "List, show, replay and discard dead letters.",
        "queues": "List queues, replace or remove their bindings, release them.",
        "tables": "Create the tables, check them, print their SQL.",
        "wal": "Make, drop and check what relays with --from wal read.",
    }

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(self.SHORT_HELPS))

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if found is None:
            found = self[name] = _loaded(name, self.SHORT_HELPS[name])
        return found

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - this is that function

    def values(self) -> Any:
        return {name: self[name] for name in self}.values()

    def items(self) -> Any:
        return {name: self[name] for name in self}.items()


def _loaded(name: str, short_help: str) -> Any:
    """The command as typer makes it, alone in a group."""
    module = import_module(f"outbox.cli.{name.replace('-', '_')}")
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.callback()(lambda: None)
    if hasattr(module, "app"):
        alone.add_typer(module.app, name=name)
    else:
        alone.command(name, short_help=short_help)(getattr(module, name))
    return get_group(alone).commands[name]
