"""The app for Django: its setup is Django's own database; `manage.py outbox` is the command after django.setup()."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from outbox import ConfigurationError
from outbox.django import database_url

SETTINGS = """
INSTALLED_APPS = ["outbox.django", "books"]
DATABASES = {{
    "default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    "books": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "{folder}/books.db"}},
}}
OUTBOX = {{"database": "books", "table_name": "book_outbox"}}
"""
MANAGE = """
import os, sys
from django.core.management import execute_from_command_line
os.environ["DJANGO_SETTINGS_MODULE"] = "project_settings"
execute_from_command_line(sys.argv)
"""
MODELS = """
from django.db import models
class Book(models.Model):
    title = models.CharField(max_length=100)
"""
LISTENERS = """
from books.models import Book
from outbox import listen
@listen("book.*", queue="books")
def on_book(book: dict): ...
everything = [on_book]
"""
VIEWS = """
from django.db import connections, transaction
from django.http import HttpResponse
from django.urls import path
from books.models import Book
from outbox import emit_sync
def write(request):
    with transaction.atomic(using="books"):
        book = Book.objects.using("books").create(title=request.POST["title"])
        emit_sync(connections["books"], "book.written", {"title": book.title}, eta=60)
        try:
            with transaction.atomic(using="books"):
                emit_sync(connections["books"], "book.sold", {})
                raise LookupError
        except LookupError:
            pass
    return HttpResponse(status=201)
urlpatterns = [path("books", write)]
"""
TESTS = """
from datetime import UTC, datetime
from django.db import connections
from django.test import TestCase, TransactionTestCase
from books.models import Book
from outbox.testing import Emission, emitted_sync
class Writing(TestCase):
    databases = {"books"}
    def test_a_book_is_announced(self):
        self.assertEqual(emitted_sync(connections["books"]), [])
        with self.captureOnCommitCallbacks(using="books", execute=True) as called:
            self.assertEqual(self.client.post("/books", {"title": "Emma"}).status_code, 201)
        [found] = emitted_sync(connections["books"])
        self.assertEqual(found, Emission("book.written", {"title": "Emma"}, eta=60))
        self.assertEqual(len(called), 1)
        self.assertLess(abs((found.message.created_at - datetime.now(UTC)).total_seconds()), 60)
    def test_every_test_begins_without_messages(self):
        self.test_a_book_is_announced()
class Committing(TransactionTestCase):
    databases = {"books"}
    def test_after_the_commit_the_transaction_is_over(self):
        self.client.post("/books", {"title": "Emma"})
        self.assertEqual(emitted_sync(connections["books"]), [])
"""
MIGRATION = """
from pathlib import Path
from django.db import migrations, models
class Migration(migrations.Migration):
    initial = True
    operations = [
        migrations.CreateModel("Book", [
            ("id", models.AutoField(primary_key=True)), ("title", models.CharField(max_length=100))
        ]),
        migrations.RunSQL(Path("outbox.sql").read_text()),
    ]
"""
EMIT = """
import django
django.setup()
from django.db import connections, transaction
from outbox import emit_sync, outbox
with transaction.atomic(using="books"):
    emit_sync(connections["books"], "book.written", {"id": 1})
print(outbox.settings.table_name)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "books").mkdir()
    files = {
        "project_settings.py": SETTINGS.format(folder=tmp_path),
        "manage.py": MANAGE,
        "books/__init__.py": "",
        "books/models.py": MODELS,
        "books/listeners.py": LISTENERS,
        "emitting.py": EMIT,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def python(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
    environment["DJANGO_SETTINGS_MODULE"] = "project_settings"
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_view_emits_and_the_commands_find_it_in_the_database_of_the_settings(project: Path) -> None:
    made = python(project, "manage.py", "outbox", "tables", "create")
    assert made.returncode == 0, made.stderr
    emitted = python(project, "emitting.py")
    assert (emitted.returncode, emitted.stdout) == (0, "book_outbox\n"), emitted.stderr
    listed = python(project, "manage.py", "outbox", "messages", "list", "--json")
    assert "book.written" in listed.stdout, listed.stderr


def test_a_module_of_listeners_may_import_models(project: Path) -> None:
    assert python(project, "manage.py", "outbox", "tables", "create").returncode == 0
    ran = python(project, "manage.py", "outbox", "doctor", "books.listeners:everything")
    assert "AppRegistryNotReady" not in ran.stderr
    assert "Traceback" not in ran.stderr
    assert "queue" in ran.stdout, ran.stderr


@pytest.mark.parametrize("time_zone", ["USE_TZ = True", "USE_TZ = False\nTIME_ZONE = 'Asia/Tokyo'"])
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_test_case_of_django_sees_what_a_view_has_emitted(
    project: Path, database: str, time_zone: str, request: pytest.FixtureRequest
) -> None:
    settings = SETTINGS.format(folder=project) + f"ROOT_URLCONF = 'books.views'\nALLOWED_HOSTS = ['*']\n{time_zone}\n"
    if database == "postgresql":
        server = make_url(request.getfixturevalue("postgresql_url"))
        own: dict[str, object] = {"NAME": f"django_{os.getpid()}", "USER": server.username, "PASSWORD": server.password}
        own |= {"HOST": server.host or server.query.get("host"), "PORT": server.port}
        settings += f"DATABASES['books'] = {{'ENGINE': 'django.db.backends.postgresql', **{own!r}}}\n"
    settings += "DATABASES['books']['TEST'] = {'DEPENDENCIES': []}\n"
    (project / "project_settings.py").write_text(settings)
    (project / "books/migrations").mkdir()
    (project / "books/migrations/__init__.py").touch()
    for name, text in (("views.py", VIEWS), ("tests.py", TESTS), ("migrations/0001_initial.py", MIGRATION)):
        (project / "books" / name).write_text(text)
    made = python(project, "manage.py", "outbox", "tables", "sql")
    assert made.returncode == 0, made.stderr
    (project / "outbox.sql").write_text(made.stdout)
    ran = python(project, "-W", "error", "manage.py", "test", "--noinput", "-v", "2")
    assert ran.returncode == 0, ran.stderr
    assert "Ran 3 tests" in ran.stderr


def test_a_wrong_command_ends_with_the_commands_own_code(project: Path) -> None:
    ran = python(project, "manage.py", "outbox", "statsu")
    assert ran.returncode == 2
    assert "Did you mean 'status'?" in ran.stderr


@pytest.mark.parametrize(
    ("database", "url"),
    [
        ({"ENGINE": "django.db.backends.sqlite3", "NAME": Path("/srv/a b.db")}, "sqlite:////srv/a b.db"),
        ({"ENGINE": "django.db.backends.postgresql", "NAME": "shop"}, "postgresql:///shop"),
        (
            {
                "ENGINE": "django.contrib.gis.db.backends.postgis",
                "NAME": "shop",
                "USER": "u",
                "PASSWORD": "p@/:",
                "HOST": "db.internal",
                "PORT": "5433",
                "OPTIONS": {"pool": True},
            },
            "postgresql://u:p%40%2F%3A@db.internal:5433/shop",
        ),
        (
            {"ENGINE": "django.db.backends.postgresql", "NAME": "shop", "HOST": "/run/postgresql", "PORT": ""},
            "postgresql:///shop?host=%2Frun%2Fpostgresql",
        ),
    ],
)
def test_a_database_of_django_is_said_as_a_url(database: dict[str, Any], url: str) -> None:
    assert database_url(database).render_as_string(hide_password=False) == url


def test_what_no_url_can_say_is_refused_with_what_to_set() -> None:
    with pytest.raises(ConfigurationError, match="knows Django's backends"):
        database_url({"ENGINE": "django.db.backends.oracle", "NAME": "x"})
    with pytest.raises(ConfigurationError, match=r"sslmode.*db_engine_url"):
        database_url({"ENGINE": "django.db.backends.postgresql", "NAME": "x", "OPTIONS": {"sslmode": "require"}})
