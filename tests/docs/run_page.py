"""Run the blocks of one page, in their order and in the current folder:

    python -m tests.docs.run_page README.md [PLACEHOLDER=postgresql+asyncpg://…]

Python blocks share one namespace and one event loop, as if they were typed into `python -m asyncio`. One that begins
with a file's name is written to that file instead. A `text` block after a Python block is what that block prints. In
`console` blocks, lines behind `$` are run, the lines below each are what it prints, and `^C` interrupts what runs for
ever; what such a program prints may come in another order. An id that the page shows stands for the one that was
printed in its place. Addresses of servers that the page names are replaced by those that are given.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import os
import shlex
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .output import ANYTHING, IDS, difference, matches
from .pages import Block, Page

PLACEHOLDER = "postgresql+asyncpg://user:password@localhost/orders"
POOLED = "postgresql+asyncpg://user:password@localhost:6432/orders"
BROKER = "amqp://user:password@localhost:5672/"
MARIADB = "mysql+asyncmy://user:password@localhost:3306/orders"
PATIENCE = 240.0  # seconds for anything that a page waits for


class NotAsShown(Exception):
    """A page and the library disagree."""


def main(path: str, *replacements: str) -> None:
    page = Page(Path(path).resolve())
    servers = dict(each.split("=", 1) for each in replacements)
    with asyncio.Runner() as runner:
        run = Run(page, runner, servers)
        for block, following in pairs(page.blocks):
            run.block(block, following)
        run.end()


def pairs(blocks: list[Block]) -> Iterator[tuple[Block, Block | None]]:
    """Each block with the one behind it."""
    yield from zip(blocks, [*blocks[1:], None], strict=True)


class Run:
    """One page's blocks, one after another."""

    def __init__(self, page: Page, runner: asyncio.Runner, servers: dict[str, str]) -> None:
        self._page = page
        self._runner = runner
        self._servers = servers  # by the addresses that the page shows
        self._main = sys.modules["__main__"] = types.ModuleType("__main__")
        self._console = Console()
        self._ids: dict[str, str] = {}  # those of the page, with those that were printed

    def block(self, block: Block, following: Block | None) -> None:
        """Run a block; the one behind it may be what it prints."""
        if block.exempted_because is not None:
            return
        text = block.text
        for shown, address in self._servers.items():
            text = text.replace(shown, address)
        if block.file_name is not None:
            Path(block.file_name).write_text(text)
        elif block.language == "python":
            printed = self._python(text, block.line)
            if following is not None and following.language == "text":
                self._compare(following.text.splitlines(), printed.splitlines(), following.line)
        elif block.language == "console":
            for command in commands(text):
                command.line = IDS.sub(lambda id: self._ids.get(id[0], id[0]), command.line)
                in_order = command.interrupted_after is None
                self._compare(command.shown, self._console.run(command), block.line, in_order=in_order)

    def end(self) -> None:
        """The last command, too, must have ended well."""
        self._console.end()

    def _python(self, text: str, line: int) -> str:
        # Empty lines before it, so that a traceback names the page's own lines.
        source = "\n" * (line - 1) + text
        code = compile(source, str(self._page.path), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            result = eval(code, vars(self._main))  # noqa: S307 - the page is this project's own
            if result is not None:
                self._runner.run(asyncio.wait_for(result, PATIENCE))
        sys.stdout.write(printed.getvalue())
        return printed.getvalue()

    def _compare(self, shown: list[str], printed: list[str], line: int, *, in_order: bool = True) -> None:
        if not shown:
            return
        found = difference(shown, printed, in_order=in_order)
        if found:
            raise NotAsShown(f"{self._page.name}, line {line}:\n{found}")
        if in_order:
            self._ids.update(zip(IDS.findall("\n".join(shown)), IDS.findall("\n".join(printed)), strict=False))


@dataclass
class Command:
    """A line behind `$`, and what the page shows of its output."""

    line: str
    shown: list[str] = field(default_factory=list)
    interrupted_after: int | None = None  # so many lines


def commands(text: str) -> list[Command]:
    """The commands of a console block."""
    found: list[Command] = []
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            found.append(Command(line.removeprefix("$ ")))
        elif line == "^C":
            found[-1].interrupted_after = len(found[-1].shown)
        else:
            found[-1].shown.append(line)
    return found


class Console:
    """What a terminal remembers between two commands: variables, and how the last command ended."""

    def __init__(self) -> None:
        programs = Path(sys.executable).parent
        self._environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "error,ignore::ResourceWarning",
            "COLUMNS": "100",
        }
        self._exit_code = 0

    def run(self, command: Command) -> list[str]:
        """What the command prints."""
        words = shlex.split(command.line)
        if words == ["echo", "$?"]:
            printed, self._exit_code = [str(self._exit_code)], 0
            return printed
        if self._exit_code:
            raise NotAsShown(f"the command before `{command.line}` ended with {self._exit_code}")
        if words[0] == "export":
            for name, _, value in (word.partition("=") for word in words[1:]):
                self._environment[name] = value
            return []
        return self._run(words, command)

    def end(self) -> None:
        if self._exit_code:
            raise NotAsShown(f"the last command ended with {self._exit_code}")

    def _run(self, words: list[str], command: Command) -> list[str]:
        process = subprocess.Popen(
            words, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        too_long = threading.Timer(PATIENCE, process.kill)
        too_long.start()
        try:
            printed = self._read(process, command)
        finally:
            too_long.cancel()
            process.kill()
            process.wait()
        self._exit_code = process.returncode
        sys.stdout.write(f"$ {command.line}\n" + "".join(f"{line}\n" for line in printed))
        return printed

    def _read(self, process: subprocess.Popen[str], command: Command) -> list[str]:
        assert process.stdout is not None
        printed: list[str] = []
        awaited = [] if command.interrupted_after is None else command.shown[: command.interrupted_after]
        awaited = [line for line in awaited if line.strip() != ANYTHING]
        for line in process.stdout:
            printed.append(line.rstrip("\n"))
            found = next((each for each in awaited if matches(each, printed[-1])), None)
            if found is not None:
                awaited.remove(found)
                if not awaited:
                    process.send_signal(signal.SIGINT)
        process.wait()
        return printed


if __name__ == "__main__":
    main(*sys.argv[1:])
