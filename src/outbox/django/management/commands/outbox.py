"""`manage.py outbox …`: the command line of outbox, after Django's own setup."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import BaseCommand

from outbox.cli import main


class Command(BaseCommand):
    """All words behind `manage.py outbox` are those of the command `outbox`."""

    help = "The command line of outbox, such as: outbox worker shop.listeners:all_listeners"
    requires_system_checks: list[str] = []  # noqa: RUF012 - Django's own way

    def run_from_argv(self, argv: list[str]) -> None:
        sys.argv = [f"{argv[0]} outbox", *argv[2:]]
        main()

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("words", nargs="*")

    def handle(self, *args: str, **options: Any) -> None:
        self.run_from_argv(["manage.py", "outbox", *(args or options["words"])])
