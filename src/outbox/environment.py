"""Environment: how an option is declared and named, how it is read from a variable or a file, and checked."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from outbox.core.binding import check_binding_key
from outbox.core.durations import IMMEDIATELY, NEVER, Retention, parse_duration
from outbox.core.errors import ConfigurationError, TimeInvalid
from outbox.core.store import DISCARD
from outbox.core.webhooks import Secrets

PREFIX = "OUTBOX_"

# Variables of the tests, and those that Kubernetes makes for a service whose name begins with outbox.
_NO_OPTION = re.compile(rf"{PREFIX}(TEST_|(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_.+)?)$)")
_reported: set[str] = set()
_log = logging.getLogger("outbox")


def option(
    default: Any,
    doc: str,
    *,
    spellings: tuple[str, ...] = (),
    shown: str | None = None,
    parse: Callable[[str], Any] | None = None,
    in_file: bool = False,
) -> Any:
    """One option: its default, when to change it, its other names, and how it is read from text or from a file."""
    about = {"doc": doc, "spellings": spellings, "shown": shown, "parse": parse, "in_file": in_file}
    return field(default=default, metadata=about)


def durations(text: str) -> tuple[timedelta, ...]:
    return tuple(parse_duration(part) for part in text.split(",") if part.strip())


def retention(text: str) -> Retention:
    return text.upper() if text.upper() in (IMMEDIATELY, NEVER) else parse_duration(text)  # type: ignore[return-value]


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"not a whole number: {text!r}") from None


def truth(text: str) -> bool:
    words = {"true": True, "1": True, "false": False, "0": False}
    if text.strip().lower() not in words:
        raise ConfigurationError(f"neither true nor false: {text!r}")
    return words[text.strip().lower()]


def json_object(example: str) -> Callable[[str], dict[str, str]]:
    def parse(text: str) -> dict[str, str]:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ConfigurationError(f"not a JSON object: write for example {example}")
        return value

    return parse


def secrets(text: str) -> Secrets:
    return Secrets(*re.split(r"[\s,]+", text.strip(" ,\t\r\n")))


def by_first_name(settings: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments under their options' first names; the same thing said twice in different ways is refused."""
    names = {name: option.name for option in fields(settings) for name in _names(option)}
    values: dict[str, Any] = {}
    said_as: dict[str, str] = {}
    for name, value in given.items():
        if name not in names:
            raise ConfigurationError(f"no option is called {name!r}; there are {', '.join(sorted(names))}")
        option = names[name]
        if value is None:
            continue
        if option in values and values[option] != value:
            raise ConfigurationError(f"{said_as[option]} and {name} are the same option with different values")
        values[option], said_as[option] = value, name
    return values


def read(option: Any, environment: Mapping[str, str], values: dict[str, Any]) -> None:
    """Take an option from the environment, if it is there."""
    parse = option.metadata["parse"]
    found = {PREFIX + name.upper(): environment.get(PREFIX + name.upper()) for name in _names(option)}
    texts = {name: text for name, text in found.items() if text}
    if option.metadata["in_file"]:
        texts |= _read_file(f"{PREFIX}{option.name.upper()}_FILE", environment)
    if parse is None or not texts:
        return
    if len(set(texts.values())) > 1:
        raise ConfigurationError(f"{' and '.join(texts)} are the same option with different values")
    name, text = next(iter(texts.items()))
    try:
        values[option.name] = parse(text)
    except (ConfigurationError, TimeInvalid) as error:
        raise ConfigurationError(f"{name}: {error}") from None


def report_unknown(settings: type[Any], environment: Mapping[str, str]) -> None:
    """Log, once in a process, each variable that looks like an option and is none, with the nearest name."""
    known = {PREFIX + name.upper() for option in fields(settings) for name in _names(option)}
    known |= {f"{PREFIX}{option.name.upper()}_FILE" for option in fields(settings) if option.metadata["in_file"]}
    for name in sorted(environment):
        if name in known or name in _reported or not name.startswith(PREFIX) or _NO_OPTION.match(name):
            continue
        _reported.add(name)
        near = get_close_matches(name.removeprefix(PREFIX), [each.removeprefix(PREFIX) for each in known], n=1)
        meant = f"did you mean {PREFIX}{near[0]}?" if near else "outbox has no option of that name"
        _log.warning("the variable %s is ignored: %s", name, meant)


def _read_file(name: str, environment: Mapping[str, str]) -> dict[str, str]:
    path = environment.get(name)
    if not path:
        return {}
    try:
        return {name: Path(path).read_text()}
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{name}: the file cannot be read: {type(error).__name__}") from None


def _names(option: Any) -> tuple[str, ...]:
    return (option.name, *option.metadata["spellings"])


def checked_unroutable(value: Any) -> dict[str, str]:
    """What becomes of messages without a queue."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigurationError('unroutable is a mapping such as {"audit.#": "discard"}')
    rules = dict(value or {})
    for pattern, action in rules.items():
        check_binding_key(pattern, "binding key of unroutable")
        if action != DISCARD:
            raise ConfigurationError(f"unroutable={{{pattern!r}: {action!r}}}: the only action is {DISCARD!r}")
    return rules


def checked_routes(value: Any) -> dict[str, Any]:
    """Destinations by their binding keys."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigurationError('routes is a mapping such as {"order.*": "https://…"}')
    if value is not None and not value:
        raise ConfigurationError("routes names no destination: add one, or leave routes out if there is to be none")
    routes = dict(value or {})
    for pattern in routes:
        check_binding_key(pattern, "binding key of routes")
    return routes
