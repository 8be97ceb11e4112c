"""Targets: what `module:attribute` on the command line names."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated

import typer

import outbox as library
from outbox.cli.exits import ExitCode, Failure
from outbox.cli.secrets import redacted
from outbox.cli.words import lines
from outbox.core.errors import OutboxError
from outbox.core.listener import Listener
from outbox.instance import Outbox

OutboxName = Annotated[
    str,
    typer.Option(
        "--outbox",
        metavar="MODULE[:ATTRIBUTE]",
        help="Which Outbox, if not outbox.outbox; a module alone is imported for the setup() in it.",
        show_default=False,
    ),
]
ListenersName = Annotated[
    str, typer.Argument(metavar="MODULE:ATTRIBUTE", help="A Listener, or a list or tuple of them.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def find_outbox(name: str) -> Outbox:
    """The Outbox that a command works with."""
    if not name:
        return library.outbox
    module, _, attribute = name.partition(":")
    _check_module(name, module)
    if not attribute:
        _load(module)
        return library.outbox
    found = _attribute(module, attribute)
    if not isinstance(found, Outbox):
        raise Failure(ExitCode.CONFIGURATION, f"{name} is a {type(found).__name__}, not an Outbox")
    return found


def find_listeners(name: str) -> Sequence[Listener]:
    """The listeners that a worker serves."""
    module, _, attribute = name.partition(":")
    _check_module(name, module)
    if not module or not attribute:
        raise Failure(
            ExitCode.USAGE, f"{name!r}: write it as MODULE:ATTRIBUTE, for example shop.listeners:all_listeners"
        )
    found = _attribute(module, attribute)
    if isinstance(found, Listener):
        return [found]
    if isinstance(found, list | tuple) and all(isinstance(each, Listener) for each in found):
        return found
    if isinstance(found, list | tuple):
        number, wrong = next((number, each) for number, each in enumerate(found) if not isinstance(each, Listener))
        raise Failure(ExitCode.CONFIGURATION, f"item {number} of {name} is {_named(wrong)}: decorate it with @listen")
    raise Failure(ExitCode.CONFIGURATION, f"{name} is {_named(found)}, not a Listener or a list or tuple of them")


def _named(found: object) -> str:
    kind = type(found).__name__.removeprefix("builtin_").removesuffix("_or_method")
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def _check_module(name: str, module: str) -> None:
    """A file is no module, although the two look alike."""
    if module.endswith(".py") or "/" in module:
        dotted = module.removesuffix(".py").removeprefix("./").strip("/").replace("/", ".")
        raise Failure(ExitCode.USAGE, f"{module} is a file: name the module, {dotted}{name.removeprefix(module)}")


def _attribute(module: str, attribute: str) -> object:
    loaded = _load(module)
    try:
        return attrgetter(attribute)(loaded)
    except AttributeError:
        raise Failure(ExitCode.CONFIGURATION, f"the module {module!r} has no attribute {attribute!r}") from None


def _load(module: str) -> object:
    """Import as a program in this folder would."""
    if os.getcwd() not in sys.path and "" not in sys.path:  # noqa: PTH109 - sys.path holds strings
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        return importlib.import_module(module)
    except OutboxError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise Failure(
                ExitCode.CONFIGURATION, f"no module is called {error.name!r}, in this folder or among those installed"
            ) from None
        raise _broken(module, error) from None
    except Exception as error:  # noqa: BLE001 - the user's module may raise anything
        raise _broken(module, error) from None


def _broken(module: str, error: Exception) -> Failure:
    """Its author needs the traceback, from where the module itself begins."""
    frames = traceback.TracebackException.from_exception(error)
    own = [frame for frame in frames.stack if "importlib" not in frame.filename and frame.filename != __file__]
    frames.stack = traceback.StackSummary.from_list(own)
    print(lines(redacted("".join(frames.format()))), file=sys.stderr)
    return Failure(ExitCode.CONFIGURATION, f"the module {module!r} cannot be imported: {type(error).__name__}")
