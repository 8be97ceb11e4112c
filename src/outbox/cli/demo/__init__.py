"""`outbox demo`: the library at work on a SQLite file, and a ledger that proves what became of every order."""

from __future__ import annotations

import asyncio
import os
import random
import shlex
import shutil
import signal
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from sqlalchemy import URL

from outbox.cli.demo.director import LEASE, Director
from outbox.cli.demo.ledger import Witness, balance
from outbox.cli.demo.stage import Stage
from outbox.cli.documents import print_document
from outbox.cli.exits import ExitCode, Failure
from outbox.cli.targets import AsJson
from outbox.environment import PREFIX

APPLICATION_ID = 0x6F757462  # in the file's header: it was made by this demo and may be replaced by the next one

DemoFile = Annotated[Path, typer.Option("--file", help="The SQLite file to play in. It is left behind.")]
Seed = Annotated[int | None, typer.Option(help="Play with the same orders as an earlier run.", show_default=False)]


def demo(file: DemoFile = Path("outbox-demo.db"), seed: Seed = None, as_json: AsJson = False) -> None:
    """Show the library at work, on SQLite.

    A shop takes orders and tells of them in the same transaction; some are rolled back. A worker process is killed in
    the middle of its work, a listener fails and tries again, a message dies and is replayed. Then all of it is counted.
    """
    if seed is None:
        seed = random.randrange(10_000)  # noqa: S311 - a story, not a secret
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: no worker is left behind
    _make_room(file)
    url = _set_up(file)
    with Stage(sys.stderr if as_json else None) as stage:
        stage.say(f"the shop opens, in {file} (seed {seed})")
        plan = asyncio.run(Director(file, seed, stage).play())
    entries = balance(file, plan)
    balanced = all(entry.balances for entry in entries)
    stage.show_ledger("ledger, counted in the file", entries)
    stage.show(f"{'The ledger balances' if balanced else 'THE LEDGER DOES NOT BALANCE'}, after {stage.seconds:.1f} s.")
    if as_json:
        ledger = [{**vars(entry), "balances": entry.balances} for entry in entries]
        print_document(
            {"file": str(file), "seed": seed, "balanced": balanced, "seconds": stage.seconds, "ledger": ledger}
        )
    else:
        stage.show("", "Look at what is left:", *(f"  {line}" for line in _commands(file, url)))
    if not balanced:
        raise Failure(ExitCode.WRONG, f"the ledger does not balance; --seed {seed} plays the same orders again")


def _make_room(file: Path) -> None:
    """Delete the file of an earlier demo, and nothing else."""
    if file.exists():
        if not _is_ours(file):
            raise Failure(ExitCode.USAGE, f"{file} exists and is not from a demo: choose another with --file")
        for part in (file, *(file.with_name(file.name + ending) for ending in ("-wal", "-shm"))):
            part.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(file)) as connection:
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    except sqlite3.OperationalError as error:
        raise Failure(ExitCode.UNREACHABLE, f"{file}: {error}") from None


def _is_ours(file: Path) -> bool:
    if not file.is_file():
        return False
    try:
        with closing(sqlite3.connect(file)) as connection:
            return bool(connection.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID)
    except sqlite3.DatabaseError:
        return False


def _set_up(file: Path) -> str:
    """The settings of the shop, for this process and for the workers it starts."""
    url = URL.create("sqlite", database=str(file)).render_as_string()
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]  # the user's real settings have no place here
    os.environ |= {
        "OUTBOX_DB_ENGINE_URL": url,
        "OUTBOX_LEASE": f"{LEASE:g}s",
        "OUTBOX_CLEAN_UP_AFTER": "NEVER",  # so that the walk of each message can be looked at
    }
    return url


def _commands(file: Path, url: str) -> list[str]:
    """How to look at what is left, with a message that failed twice and one that the killed worker held."""
    outbox = _this_command()
    with closing(Witness(file)) as witness:
        failed, cut = witness.message_ids()
    return [
        f"export OUTBOX_DB_ENGINE_URL={shlex.quote(url)}",
        f"{outbox} status",
        f"{outbox} messages list --queue courier --limit 5",
        *(f"{outbox} messages show {message_id}" for message_id in dict.fromkeys((failed, cut))),
    ]


def _this_command() -> str:
    """`outbox` if that is what a shell would find, or how it was called instead."""
    called = Path(sys.argv[0])
    if called.name == "outbox":
        found = shutil.which("outbox")
        return "outbox" if found and Path(found).samefile(called) else shlex.quote(str(called))
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    return f"{shlex.quote(str(python))} -m outbox"
