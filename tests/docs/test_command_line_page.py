"""The page about the command line tells every command, option and exit code, and invents none."""

from __future__ import annotations

import re

from outbox.cli.exits import ExitCode

from .command_line import all_commands, options
from .pages import ROOT, Page
from .run_page import commands

PAGE = Page(ROOT / "docs/command-line.md")
TEXT = PAGE.text
FOR_ALL = ("--help", "--version", "--outbox", "--json")  # told once, in the table of what commands share


def test_every_command_is_told_under_its_own_heading() -> None:
    for name, _ in all_commands():
        noun = name.split()[0]
        section = _section(f"outbox {noun}")
        assert f"`{name}" in section or f"$ outbox {name}" in section, name


def test_every_option_is_told_where_its_command_is() -> None:
    for name, command in all_commands():
        section = _section(f"outbox {name.split()[0]}")
        missing = [option for option in options(command) if option not in FOR_ALL and f"`{option}`" not in section]
        assert not missing, f"outbox {name}: {missing}"


def test_the_options_that_commands_share_are_told_with_those_that_lack_them() -> None:
    rows = dict(re.findall(r"^\| all but (.+) \| `(--\w+)`", TEXT, re.MULTILINE))
    told = {option: set(re.findall(r"`(.+?)`", names)) for names, option in rows.items()}
    lacking = {
        option: {name for name, command in all_commands() if option not in options(command)}
        for option in ("--outbox", "--json")
    }
    assert told == lacking


def test_no_option_is_told_that_does_not_exist() -> None:
    known = {option for _, command in all_commands() for option in options(command)} | set(FOR_ALL)
    told = {word for span in PAGE.code_spans for word in re.findall(r"--[\w-]+", span)}
    assert told - known == set()


def test_every_command_of_an_example_exists() -> None:
    names = [name for name, _ in all_commands()]
    lines = [command.line for block in PAGE.blocks if block.language == "console" for command in commands(block.text)]
    outbox_lines = [line.removeprefix("outbox ") for line in lines if line.startswith("outbox ")]
    assert len(outbox_lines) > 10
    assert not [line for line in outbox_lines if not any(line.startswith(name) for name in names)]


def test_the_exit_codes_are_those_of_the_program() -> None:
    told = re.findall(r"^\| (\d+) \| (.+) \|$", _section("Exit codes"), re.MULTILINE)
    assert told == [(str(code.value), code.meaning) for code in ExitCode]


def _section(heading: str) -> str:
    found = re.search(rf"^## {re.escape(heading)}\n(.+?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None, f"no heading {heading!r}"
    return found[1]
