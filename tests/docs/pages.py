"""Page: a Markdown file of this project, and the blocks of code in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]

_EXEMPTION = re.compile(r"<!-- not run: (.+?) -->", re.DOTALL)
_FILE = re.compile(r"# (\w+\.py)\n")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the page on which the text begins."""

    language: str
    text: str
    line: int
    exempted_because: str | None = None

    @property
    def file_name(self) -> str | None:
        """A Python block whose first line is a comment with a file's name is that file."""
        found = _FILE.match(self.text)
        return found[1] if found and self.language == "python" else None


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix() if self.path.is_relative_to(ROOT) else self.path.name

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tokens(self) -> list[Token]:
        return MarkdownIt().enable("table").parse(self.text)

    @cached_property
    def inline(self) -> list[Token]:
        """Every piece of running text: words, links, code spans."""
        return [child for token in self.tokens for child in token.children or ()]

    @cached_property
    def blocks(self) -> list[Block]:
        """The fenced blocks, in the order of the page."""
        found: list[Block] = []
        exemption: str | None = None
        for token in self.tokens:
            if token.type == "html_block":
                match = _EXEMPTION.search(token.content)
                exemption = match[1] if match else None
            elif token.type == "fence":
                assert token.map is not None
                language = token.info.split()[0] if token.info else ""
                found.append(Block(language, token.content, token.map[0] + 2, exemption))
                exemption = None
            elif token.nesting >= 0:
                exemption = None
        return found

    @cached_property
    def code_spans(self) -> list[str]:
        return [token.content for token in self.inline if token.type == "code_inline"]

    @cached_property
    def links(self) -> list[str]:
        return [str(token.attrs["href"]) for token in self.inline if token.type == "link_open"]

    @cached_property
    def anchors(self) -> set[str]:
        """What `#…` may follow a link to this page: its headings, as the hosts of repositories spell them."""
        headings = [
            after.content
            for token, after in zip(self.tokens, self.tokens[1:], strict=False)
            if token.type == "heading_open"
        ]
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def all_pages() -> list[Page]:
    """README, CHANGELOG, CONTRIBUTING and everything in docs."""
    return [Page(path) for path in [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]]
