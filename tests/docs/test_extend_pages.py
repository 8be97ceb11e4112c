"""What the pages on extending build is found by the entry points that they show."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from outbox import Outbox
from outbox.adapters import store_class

from .pages import ROOT, Page

TRANSPORT = Page(ROOT / "docs/extend/transport.md")
STORE = Page(ROOT / "docs/extend/store.md")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which modules can be imported and distributions found."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_transport_of_its_page_is_found_by_its_url(project: Path) -> None:
    install(TRANSPORT, project)
    outbox = Outbox(transport=f"folder://{project}/spool")
    assert (outbox.transport.name, outbox.transport.root) == ("folder", project / "spool")  # type: ignore[attr-defined]


async def test_the_store_of_its_page_is_found_by_its_dialect(project: Path) -> None:
    install(STORE, project)
    assert store_class("notebook").async_drivers == ("aiosqlite",)
    outbox = Outbox(db_engine_url=f"notebook+aiosqlite:///{project}/shop.db")
    async with outbox.transaction() as session:
        await outbox.emit(session, "order.created", {"id": 1})
    assert (await outbox.backlog()).waiting == 1
    await outbox.close()


@pytest.mark.parametrize("page", [TRANSPORT, STORE], ids=["transport", "store"])
def test_the_page_runs_the_whole_contract(page: Page) -> None:
    [tests] = [block.text for block in page.blocks if (block.file_name or "").startswith("test_")]
    assert "Contract):" in tests
    [command] = [block.text for block in page.blocks if "pytest" in block.text and block.language == "console"]
    assert " -k " not in command


def install(page: Page, folder: Path) -> None:
    """The page's files, as a distribution with the entry points that it shows."""
    for block in page.blocks:
        if block.file_name is not None:
            (folder / block.file_name).write_text(block.text)
    [shown] = [block.text for block in page.blocks if "[project.entry-points" in block.text]
    groups: dict[str, dict[str, str]] = tomllib.loads(shown)["project"]["entry-points"]
    about = folder / "page-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: page\nVersion: 1.0\n")
    with (about / "entry_points.txt").open("w") as file:
        for group, points in groups.items():
            print(f"[{group}]", *(f"{name} = {target}" for name, target in points.items()), sep="\n", file=file)
