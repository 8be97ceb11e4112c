#!/usr/bin/env python3
"""Write what lists the settings elsewhere: `python docs/generate.py`. A test says so when a file is out of date."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from outbox.core.durations import parse_duration
from outbox.core.listener import Listener
from outbox.core.retry import RetryPolicy
from outbox.environment import PREFIX
from outbox.settings import Settings

PAGE = Path(__file__).with_name("configuration.md")
OPTIONS = Path(__file__).parents[1] / "src/outbox/options.py"

# Where the comment in the code is the default and nothing more.
MEANINGS = {
    "queue": "where its messages wait; choose a name that outlives the code's own",
    "retry_delays": "the delays between attempts: a sequence, a RetryPolicy, a function, or one of these by error",
    "timeout": "how long one attempt may take: a duration, or a function of the message",
    "isolation_level": "that of the listener's transaction: its name, or a function of the message",
    "session_factory": "where its sessions come from: a URL, a factory, or a function of the message",
    "lease": "how long a claim on this queue holds without a sign of life",
}

CONFIGURATION = """\
# Configuration

This page answers: which options are there, what are their defaults, and when should they change?
It is generated from the code by `docs/generate.py`.

## Options of setup

Each option is an argument of `setup(…)` and of `Outbox(…)`. Those with a variable can also come from the
environment. An argument comes before a variable, a variable before the default.

{settings}

- Several names for one option are all accepted. Two of them with different values are refused.
- Durations are a number of seconds or a `timedelta`. In a variable they may have units: `500ms`, `90s`, `1h30m`, `7d`.
- `{prefix}RETRY_DELAYS` and `{prefix}RELAY_RETRY_DELAYS` are durations with commas between them: `1,10,1m,5m`.
- `transport` takes URLs: `amqp://…` and `amqps://…` for RabbitMQ, `https://…`, and `memory://`, queues in this process,
  for tests.
- `{prefix}UNROUTABLE` is a JSON object: `{{"audit.#": "discard"}}`.
- So is `{prefix}ROUTES`, of URLs: `{{"order.*": "https://billing.example/hook"}}`. See [routes](learn/routes.md).

```python
from datetime import timedelta

from outbox import NEVER, Outbox, RetryPolicy

outbox = Outbox(
    db_engine_url="sqlite+aiosqlite:///shop.db",
    table_name="shop_outbox",
    retry_delays=RetryPolicy.exponential(1, 2, cap=timedelta(minutes=5), jitter=0.2, attempts=12),
    clean_up_after=NEVER,
    unroutable={{"audit.#": "discard"}},
)
print(outbox.settings.table_name, outbox.settings.lease)
```

```text
shop_outbox 0:01:00
```

## Options of a listener

`@listen(binding_key, …)` and `Listener(binding_key, callback, …)` take these:

{listener}

## RetryPolicy

`retry_delays` takes a sequence of delays, a function, or a `RetryPolicy`. A policy is made by one of these:

{shapes}

All of them take these options:

{policy}

```python
from outbox import RetryPolicy

policy = RetryPolicy.exponential(1, 2, cap=10, attempts=6)
print([policy.delay(attempt, OSError()).total_seconds() for attempt in range(1, 6)], policy.delay(6, OSError()))
```

```text
[1.0, 2.0, 4.0, 8.0, 10.0] None
```
"""

TYPED_OPTIONS = '''\
"""Options: what `setup()` and `Outbox()` take, for editors and type checkers. `docs/generate.py` writes this file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.core.backoff import RestartDelay
from outbox.core.durations import Retention, Seconds
from outbox.core.events import Observer
from outbox.core.retry import RetryDelays
from outbox.core.webhooks import AnySecrets


class Options(TypedDict, total=False):
    """What `setup()` and `Outbox()` take. An option that is None counts as not given."""

{options}
'''


def page() -> str:
    """The whole page."""
    return CONFIGURATION.format(
        prefix=PREFIX,
        settings=_table(("option", "default", "variable", "what it is, and when to change it"), _settings()),
        listener=_table(("option", "default", "meaning"), _options(Listener, skipped=("binding_key", "callback"))),
        shapes=_table(("made by", "delays"), _shapes()),
        policy=_table(("option", "default", "meaning"), _options(RetryPolicy, skipped=("shape", "regular", "choices"))),
    )


def _settings() -> Iterator[tuple[str, ...]]:
    for option in fields(Settings):
        about = option.metadata
        names = [option.name, *about["spellings"]]
        variable = f"`{PREFIX}{option.name.upper()}`" if about["parse"] else "none"
        yield (", ".join(f"`{name}`" for name in names), about["shown"] or _default(option), variable, about["doc"])


def typed_options() -> str:
    """The module that shows the options to editors and type checkers."""
    return TYPED_OPTIONS.format(options="\n".join(_typed_options()))


def _typed_options() -> Iterator[str]:
    for option in fields(Settings):
        about, kind = option.metadata, str(option.type)
        kind = kind if kind == "Any" or kind.endswith("| None") else f"{kind} | None"
        default = f"Default: {about['shown'] or _default(option)}."
        lines = [line for text in (about["doc"], default) for line in textwrap.wrap(text, 110, break_on_hyphens=False)]
        yield f"    {option.name}: {kind}"
        yield textwrap.indent("\n".join([f'"""{lines[0]}', *lines[1:], '"""']), "    ")
        for name in about["spellings"]:
            yield f'    {name}: {kind}\n    """Another name of `{option.name}`."""'


def _options(kind: type, skipped: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The fields of a dataclass, with the comments behind them."""
    comments = dict(re.findall(r"^    (\w+): [^#\n]+?  # (.+)$", inspect.getsource(kind), re.MULTILINE))
    for option in fields(kind):
        if option.init and option.name not in skipped:
            comment = comments[option.name]
            said = re.fullmatch(r"default: (.+)", comment)
            yield f"`{option.name}`", said[1] if said else _default(option), MEANINGS[option.name] if said else comment


def _shapes() -> Iterator[tuple[str, str]]:
    for name in ("sequence", "constant", "linear", "exponential", "calling", "by_error"):
        method = getattr(RetryPolicy, name)
        parameters = inspect.signature(method).parameters.values()
        shown = [str(each.replace(annotation=each.empty)) for each in parameters if each.kind != each.VAR_KEYWORD]
        arguments = ", ".join(shown)
        yield f"`RetryPolicy.{name}({arguments})`", inspect.getdoc(method) or ""


def _default(option: Field[Any]) -> str:
    value = option.default
    if value is None or value == ():
        return "none"
    if isinstance(value, str | tuple | bool):
        return f"`{value}`"
    unit = " s" if option.metadata.get("parse") is parse_duration else ""
    return f"{value:g}{unit}"


def _table(headings: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [headings, *rows]
    rendered = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([rendered[0], "|" + "---|" * len(headings), *rendered[1:]])


if __name__ == "__main__":
    PAGE.write_text(page())
    OPTIONS.write_text(typed_options())
