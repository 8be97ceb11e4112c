"""What a package index shows: README, with links that lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?![a-z]+:|#)([^()\s]*)\)")
WITHOUT_LINKS = """
On this page the names of other pages are no links. They are files of the source distribution: unpack it and begin with
`docs/index.md`.
"""


class ReadmeHook(MetadataHookInterface):
    """README's links are relative to the repository, and a package index knows no repository."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text()
        source = metadata.get("urls", {}).get("Source", "")
        metadata["readme"] = {"content-type": "text/markdown", "text": readable_anywhere(text, source)}


def readable_anywhere(text: str, source: str) -> str:
    """Relative links become absolute ones below `Source` of [project.urls], or plain text where there is none."""
    if source:
        return LINK.sub(rf"[\1]({source.rstrip('/')}/\2)", text)
    return LINK.sub(r"\1", text) + WITHOUT_LINKS
