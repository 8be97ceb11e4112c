"""The pages for those who operate it name commands, numbers and limits that exist."""

from __future__ import annotations

import re
from dataclasses import fields
from datetime import timedelta

import pytest

from outbox import Listener, doctor
from outbox.cli.status import Rates
from outbox.core.durations import parse_duration
from outbox.core.retry import MOST_KNOWN
from outbox.core.store import Backlog, QueueBacklog
from outbox.stores.postgresql import examination as postgresql_examination
from outbox.stores.sqlite import examination as sqlite_examination
from outbox.transports.rabbitmq.provisioning import permissions
from outbox.transports.rabbitmq.topology import STEPS, Names, Topology

from .command_line import all_commands, options
from .pages import ROOT, Page, all_pages

RABBITMQ = Page(ROOT / "docs/operate/rabbitmq.md")
WATCHING = Page(ROOT / "docs/operate/watching.md")
ALERTS, ON_RABBITMQ = (
    re.findall(r"^\| (`.+?) \|", WATCHING.text.partition(f"## {title}\n")[2].partition("\n## ")[0], re.MULTILINE)
    for title in ("Alerts", "On RabbitMQ")
)


QUEUE_NUMBERS = {each.name for each in fields(QueueBacklog)} - {"queue", "transport"}


@pytest.mark.parametrize("page", all_pages(), ids=lambda page: page.name)
def test_every_command_that_a_page_names_exists_with_its_options(page: Page) -> None:
    known = dict(all_commands())
    groups = {name.split()[0] for name in known}
    for span in page.code_spans:
        words = span.split()
        if words[:1] != ["outbox"] or len(words) == 1 or not words[1].islower():
            continue
        name = next((name for name in known if span.removeprefix("outbox ").startswith(name)), None)
        assert name is not None or span.removeprefix("outbox ") in groups, span
        if name is not None:
            assert {word for word in words if word.startswith("--")} <= set(options(known[name])), span


def test_every_number_to_watch_is_in_the_document_of_status() -> None:
    counted = {each.name for each in fields(Backlog)}
    counted |= {f"queues[].{each.name}" for each in fields(QueueBacklog)}
    counted |= {f"rates.{each.name}" for each in fields(Rates)}
    named = [re.findall(r"`(.+?)`", row) for row in ALERTS]
    assert len(named) == 6
    assert {names[0] for names in named} <= counted
    on_rabbitmq = {name for row in ON_RABBITMQ for name in re.findall(r"`(.+?)`", row)}
    assert on_rabbitmq <= counted | {"rates"}
    assert {names[0].split(".rows")[0] for names in named} <= on_rabbitmq, "each alert works there, or it says why not"
    assert on_rabbitmq >= {f"queues[].{name}" for name in QUEUE_NUMBERS}


def test_the_limits_are_those_of_the_doctor() -> None:
    text = WATCHING.text
    assert timedelta(minutes=1) == doctor.PATIENCE
    assert timedelta(minutes=5) == postgresql_examination.LONG_OPEN
    assert "| 60 | 600 |" in text
    assert "`doctor` warns at a minute" in text
    assert "transactions older than 5 minutes" in text
    assert f"above {postgresql_examination.DEAD_ROWS:,}".replace(",", " ") in text
    assert f"above {sqlite_examination.LARGEST_LOG // 1024**2} MiB" in text


def test_the_steps_of_delays_are_those_of_the_code() -> None:
    section = RABBITMQ.text.partition("## Delays")[2].partition("## Provisioning")[0]
    listed = " ".join(line for line in section.splitlines() if line.startswith("- "))
    told = {parse_duration(f"{number}{unit}") for number, unit in re.findall(r"(\d+) (ms|s|h)\b", listed)}
    told |= {timedelta(minutes=int(number)) for number in re.findall(r"(\d+) min", listed)}
    days = listed.partition("- 1, ")[2].partition(" days")[0]
    told |= {timedelta(days=int(number)) for number in ["1", *re.findall(r"\d+", days)]}
    assert told == set(STEPS)
    assert f"at most {MOST_KNOWN}." in " ".join(section.split())


def test_the_rights_at_rabbitmq_are_those_that_are_printed() -> None:
    rows = dict(re.findall(r"^\| (relay|worker) \| (.+) \|$", RABBITMQ.text, re.MULTILINE))
    told = {role: [cell.replace("\\|", "|") for cell in re.findall(r"`(.+?)`", row)] for role, row in rows.items()}
    relay, worker = permissions(Topology.of(Names(), [Listener("#", print, queue="all")], ()))
    assert told["relay"] == [relay.configure, relay.write, relay.read]
    assert told["worker"][:2] == [worker.configure, worker.write]
    assert all(name.replace("outbox.", "outbox\\.", 1) in worker.read for name in told["worker"][2:])
