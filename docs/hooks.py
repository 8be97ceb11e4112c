"""Hooks of the site: pages from outside of `docs` joined to it, links as the repository spells them."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]

# Where a file of the repository stands on the site. README is the first page, and the index of docs one of the others.
ELSEWHERE = {
    "README.md": "index.md",
    "docs/index.md": "pages.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changes.md",
    "SECURITY.md": "project/security.md",
    "LICENSE": "project/licence.md",
    **{
        path.relative_to(ROOT).as_posix(): f"examples/{path.parent.name}.md"
        for path in sorted(ROOT.glob("examples/*/README.md"))
    },
}
SOURCES = {page: source for source, page in ELSEWHERE.items()}
FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?![a-z]+:)([^()\s#]*)(#[^()\s]*)?\)")
FOREIGN = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=["']?(?:https?:)?//[^"'>\s]+""")

log = get_plugin_logger("site")


def on_config(config: Any) -> Any:
    """Write out the patterns of the navigation, and spell headings as hosts of repositories do."""
    config.nav = [_written_out(item) for item in config.nav]
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    return config


def on_files(files: Any, config: Any) -> Any:
    """Join the files that stand elsewhere; the index of docs makes room for README."""
    files.remove(files.get_file_from_path("index.md"))
    for source, page in ELSEWHERE.items():
        text = (ROOT / source).read_text()
        content = text if source.endswith(".md") else f"# Licence\n\n```text\n{text}```\n"
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links lead from one file of the repository to another; here they lead from page to page."""
    pieces, position = [], 0
    for fence in FENCE.finditer(markdown):
        pieces += [_indented(_linked(markdown[position : fence.start()], page.file.src_uri)), fence[0]]
        position = fence.end()
    return "".join([*pieces, _indented(_linked(markdown[position:], page.file.src_uri))])


def on_post_build(config: Any) -> None:
    """Nothing on the site is fetched from another host."""
    for path in sorted(Path(config.site_dir).rglob("*.html")):
        for found in FOREIGN.findall(path.read_text()):
            if 'rel="canonical"' not in found:
                log.warning("%s asks another host: %s", path.relative_to(config.site_dir), found)


def anchor(heading: str, separator: str) -> str:
    """What `#…` leads to a heading: the rule of `tests/docs/pages.py`."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def _linked(text: str, page: str) -> str:
    source = SOURCES.get(page, f"docs/{page}")

    def link(found: re.Match[str]) -> str:
        text, path, heading = found[1], found[2], found[3] or ""
        if not path:
            return found[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if target in ELSEWHERE or target.startswith("docs/"):
            on_site = ELSEWHERE.get(target, target.removeprefix("docs/"))
            return f"[{text}]({posixpath.relpath(on_site, posixpath.dirname(page) or '.')}{heading})"
        if (ROOT / target).exists():
            return text  # a file of the repository that is no page
        return found[0]

    return LINK.sub(link, text)


def _indented(text: str) -> str:
    """What is inside of an item of a list is indented by two or three spaces in CommonMark, and by four here."""
    lines, deeper, closing = [], 0, ""
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip(" "))
        if not closing:
            deeper = 4 - indent if indent in (2, 3) else 0
        lines.append(" " * deeper + line if line.strip() else line)
        fence = line.strip()[:3]
        if fence in ("```", "~~~"):
            closing = "" if closing else fence
    return "\n".join(lines)


def _written_out(item: Any) -> Any:
    if isinstance(item, str):
        return item
    (title, content), *_ = item.items()
    if isinstance(content, list):
        return {title: [_written_out(each) for each in content]}
    if "*" in content:
        there = [f"docs/{path.relative_to(ROOT / 'docs').as_posix()}" for path in (ROOT / "docs").glob(content)]
        pages = {each.removeprefix("docs/") for each in there} | {page for page in SOURCES if Path(page).match(content)}
        return {title: sorted(pages)}
    return item
