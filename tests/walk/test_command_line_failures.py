"""The command line when things are wrong: one line, a code, no credentials, and nothing a stranger wrote is obeyed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from typer.core import TyperGroup
from typer.main import get_command

from outbox import Outbox, Reject, listen
from outbox.cli import app
from outbox.cli.exits import ExitCode
from outbox.testing.servers import PostgreSQL
from tests.support.commands import APPLICATION, SOON, Command, all_dead, until

CANARY = "canary-7hX2"


async def test_without_a_database_the_command_says_what_to_set(tmp_path: Path) -> None:
    ran = Command(tmp_path).process("status")
    assert (ran.code, ran.stdout, len(ran.stderr.splitlines())) == (ExitCode.CONFIGURATION, "", 1)
    assert "OUTBOX_DB_ENGINE_URL" in ran.stderr


@pytest.mark.parametrize("setting", [{"OUTBOX_LEASE": "soon"}, {"OUTBOX_TABLE_NAME": "no-name"}])
async def test_a_setting_that_cannot_be_ends_with_3(sqlite_command: Command, setting: dict[str, str]) -> None:
    ran = await sqlite_command.run("tables", "create", **setting)
    assert (ran.code, ran.stdout, len(ran.stderr.splitlines())) == (ExitCode.CONFIGURATION, "", 1)


@pytest.fixture(scope="module")
def guarded_url() -> Iterator[str]:
    """A PostgreSQL that asks the role `guarded` for its password, with a wrong one in the URL."""
    with PostgreSQL() as server:
        asyncio.run(_execute(server.url, "CREATE ROLE guarded LOGIN PASSWORD 'another'"))
        server.stop()
        rules = server.folder / "data/pg_hba.conf"
        rules.write_text("host all guarded 127.0.0.1/32 scram-sha-256\nhost all all 127.0.0.1/32 trust\n")
        server.start()
        url = make_url(server.url).set(username="guarded", password=CANARY)
        yield url.render_as_string(hide_password=False)


async def _execute(url: str, statement: str) -> None:
    engine = create_async_engine(url.replace("postgresql:", "postgresql+asyncpg:"))
    async with engine.begin() as connection:
        await connection.execute(text(statement))
    await engine.dispose()


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
@pytest.mark.parametrize("wrong", ["port", "host", "password", "database"])
def test_a_database_that_cannot_be_reached_is_one_line_without_credentials(
    guarded_url: str, tmp_path: Path, driver: str, wrong: str
) -> None:
    url = make_url(guarded_url).set(drivername=f"postgresql+{driver}")
    match wrong:
        case "port":
            url = url.set(port=1)
        case "host":
            url = url.set(host="nowhere.invalid")
        case "database":
            url = url.set(database="nowhere", username="outbox")
    command = Command(tmp_path, {"OUTBOX_DB_ENGINE_URL": url.render_as_string(hide_password=False)})
    ran = command.run_now("status", "--json")
    assert (ran.code, ran.stdout, len(ran.stderr.splitlines())) == (ExitCode.UNREACHABLE, "", 1)
    assert ran.stderr.startswith(f"error: cannot reach the database {url.host}:{url.port}/{url.database}: ")
    assert CANARY not in ran.said


@pytest.mark.parametrize(
    "url",
    [
        f"{CANARY}",
        f"nonsense://shop:{CANARY}@db/shop",
        f"postgresql://shop:{CANARY}@db:port/shop",
        f"postgresql://shop:{CANARY}/{CANARY}:{CANARY}@db.invalid/shop",
        f"postgresql://shop:first@{CANARY}@127.0.0.1:1/shop",
        f"postgresql+asyncpg://127.0.0.1:1/shop?user=shop&password={CANARY}",
        f"postgresql+psycopg://127.0.0.1:1/shop?user=shop&password={CANARY}&nonsense=1",
        f"sqlite://shop:{CANARY}@db/shop.db",
    ],
)
async def test_a_url_that_cannot_be_right_does_not_give_its_password_away(tmp_path: Path, url: str) -> None:
    ran = await Command(tmp_path, {"OUTBOX_DB_ENGINE_URL": url}).run("status")
    assert ran.code in (ExitCode.CONFIGURATION, ExitCode.UNREACHABLE)
    assert (ran.stdout, ran.error_lines, len(ran.stderr.splitlines())) == ("", 1, 1)
    assert CANARY not in ran.said


async def test_an_error_nobody_expected_is_shown_with_its_traceback_but_not_its_credentials(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(
        "from outbox import Outbox\n"
        "class Odd(Outbox):\n"
        "    async def backlog(self):\n"
        f'        raise RuntimeError("no: postgresql://shop:{CANARY}@db/shop")\n'
        'outbox = Odd(db_engine_url="sqlite:///odd.db")\n'
    )
    assert Command(tmp_path).process("tables", "create", "--outbox", "odd:outbox").code == ExitCode.FINE
    ran = Command(tmp_path).process("status", "--outbox", "odd:outbox")
    assert (ran.code, ran.stdout) == (ExitCode.WRONG, "")
    assert "Traceback" in ran.stderr and "RuntimeError: no: postgresql://***@db/shop" in ran.stderr
    assert CANARY not in ran.said


@pytest.mark.parametrize("arguments", [["relay"], ["worker", "application:everything"]])
async def test_relay_and_worker_end_with_4_if_they_cannot_reach_the_database(
    sqlite_application: Command, arguments: list[str]
) -> None:
    url = f"postgresql://shop:{CANARY}@127.0.0.1:1/shop"
    ran = sqlite_application.process(*arguments, OUTBOX_DB_ENGINE_URL=url)
    assert (ran.code, ran.stdout, ran.error_lines) == (ExitCode.UNREACHABLE, "", 1)
    assert CANARY not in ran.said


async def test_a_file_that_is_no_database_and_one_that_is_not_there(sqlite_command: Command) -> None:
    file = sqlite_command.folder / "outbox.db"
    missing = await sqlite_command.run("status")
    assert (missing.code, missing.stdout) == (ExitCode.UNREACHABLE, "")
    assert str(file) in missing.stderr
    assert not file.exists(), "looking must not make what it looks for"
    file.write_text("something else entirely, and long enough to be looked at as a header" * 20)
    ran = await sqlite_command.run("status")
    assert (ran.code, len(ran.stderr.splitlines())) == (ExitCode.UNREACHABLE, 1)


@pytest.mark.parametrize("arguments", [["nonsense"], ["status", "--nonsense"], ["messages", "list", "--state", "dead"]])
async def test_a_command_that_does_not_exist_ends_with_2(sqlite_command: Command, arguments: list[str]) -> None:
    ran = await sqlite_command.run(*arguments)
    assert (ran.code, ran.stdout) == (ExitCode.USAGE, "")


def test_a_pipe_that_is_closed_early_is_no_error(sqlite_command: Command) -> None:
    script = f"{sys.executable} -m outbox tables sql --dialect postgresql | head -1"
    ran = subprocess.run(
        ["bash", "-c", script], env=sqlite_command.environment, capture_output=True, text=True, timeout=SOON, check=True
    )
    assert ran.stdout == "CREATE TABLE outbox_table (\n"
    assert ran.stderr == ""


# Secrets and strangers.


def every_command() -> Iterator[list[str]]:
    root = get_command(app)
    assert isinstance(root, TyperGroup)
    for name, found in root.commands.items():
        if isinstance(found, TyperGroup):
            yield from ([name, inner] for inner in found.commands)
        else:
            yield [name]


ARGUMENTS = {
    "messages show": ["no-such-id"],
    "dead-letters show": ["1"],
    "dead-letters replay": ["--all"],
    "dead-letters discard": ["--all", "--yes"],
    "queues remove": ["nobody"],
    "tables switch-transport": ["database"],
    "worker": ["application:everything"],
}
SERVE = ("worker", "relay")
PLAYS_BY_ITSELF = ("demo",)  # it forgets the environment's settings


@pytest.mark.parametrize("words", list(every_command()), ids=" ".join)
async def test_no_command_shows_a_password_nor_steers_the_terminal(
    words: list[str], postgresql_url: str, table_name: str, tmp_path: Path
) -> None:
    (tmp_path / "application.py").write_text(APPLICATION)
    url = make_url(postgresql_url).set(password=CANARY).render_as_string(hide_password=False)
    command = Command(tmp_path, {"OUTBOX_DB_ENGINE_URL": url, "OUTBOX_TABLE_NAME": table_name})
    arguments = ARGUMENTS.get(" ".join(words), [])
    ran = [await command.run(*words, "--help")]
    if words[0] not in PLAYS_BY_ITSELF:
        unreachable = f"postgresql://shop:{CANARY}@127.0.0.1:1/shop"
        if words[0] in SERVE:  # they heed signals, which only a process of its own can
            ran.append(command.process(*words, *arguments, OUTBOX_DB_ENGINE_URL=unreachable))
        else:
            ran.append(await command.run(*words, *arguments, OUTBOX_DB_ENGINE_URL=unreachable))
    if words[0] not in (*SERVE, *PLAYS_BY_ITSELF):
        ran.append(await command.run(*words, *arguments))
        if "--json" in ran[0].stdout:
            ran.append(await command.run(*words, *arguments, "--json"))
    for each in ran:
        assert each.said
        assert CANARY not in each.said
        assert "\x1b" not in each.said
        assert "Traceback" not in each.said


HOSTILE = "a.\u202e[bold red]b[/]\x9b31m.{x}"


async def test_what_a_stranger_wrote_is_shown_and_never_obeyed(command: Command, outbox: Outbox) -> None:
    @listen("#", queue="[link=file:///etc]q[/link]")
    async def hostile(body: object) -> None:
        raise Reject("\x1b]0;title\x07 [red]error[/red] \u2066 \x9b2J")

    async with outbox.running(listeners=[hostile]):
        async with outbox.transaction() as session:
            message = await outbox.emit(session, HOSTILE, "\x1b[2J", key="k\x85[u]", headers={"x": "\x9bm[i]"})
        assert message is not None
        [letter] = await until(lambda: all_dead(outbox, 1))
    ran = [
        await command.run("status", "--interval", "0"),
        await command.run("queues", "list"),
        await command.run("dead-letters", "list", "--body"),
        await command.run("dead-letters", "show", str(letter.id), "--body"),
        await command.run("messages", "show", message.id, "--body"),
    ]
    await outbox.dead_letters.replay([letter.id])
    ran += [
        await command.run("messages", "list", "--body"),
        await command.run("messages", "show", message.id, "--body"),
        await command.run("messages", "list", "--body", "--json"),
    ]
    for each in ran:
        assert each.code == 0
        assert not [sign for sign in each.stdout if not sign.isprintable() and sign != "\n"]
    assert r"a.\u202e[bold red]b[/]\x9b31m.{x}" in ran[4].stdout
    assert r"[red]error[/red] \u2066 \x9b2J" in ran[3].stdout
    assert "[link=file:///etc]q[/link]" in ran[0].stdout
    assert ran[-1].document["messages"][0]["message"]["routing_key"] == HOSTILE


async def test_logs_escape_what_a_stranger_wrote(sqlite_application: Command, sqlite_outbox: Outbox) -> None:
    outbox = sqlite_outbox
    module = 'from outbox import listen\n\n\n@listen("#", queue="q")\nasync def listener(body):\n    pass\n'
    (sqlite_application.folder / "quiet.py").write_text(module)
    async with outbox.transaction() as session:
        await outbox.emit(session, HOSTILE, {})
    with sqlite_application.started("worker", "quiet:listener") as worker:
        await until(lambda: no_message(outbox))
        worker.terminate()
        _, log = await asyncio.to_thread(worker.communicate, timeout=SOON)
    assert r"handled a.\u202e[bold red]b[/]\x9b31m.{x}" in log
    assert not [sign for sign in log if not sign.isprintable() and sign != "\n"]


async def no_message(outbox: Outbox) -> bool:
    return not await outbox.messages()
