"""Settings: every option once, with its default, its spellings and its variable in the environment."""

import dataclasses
import itertools
import math
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from outbox import IMMEDIATELY, NEVER, ConfigurationError, Message, Outbox, OutboxError, RetryPolicy, environment
from outbox.core.webhooks import Secrets
from outbox.environment import PREFIX
from outbox.settings import Settings
from outbox.transports.http import HttpTransport
from outbox.transports.memory import MemoryTransport

CANARY = "c4n4ry-p4ssw0rd"
OPTIONS = dataclasses.fields(Settings)
SPELLINGS = ("transport", "rabbitmq_url", "rmq_connection_url", "rmq_connection")
OBJECTS = ("db_engine", "redact_error", "observers")  # what text cannot say


def given(**options: Any) -> Settings:
    return Settings.of(options, environment={})


def read(**environment: str) -> Settings:
    return Settings.of({}, environment)


async def publish(message: Message) -> None: ...


# What there is.


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_says_when_to_change_it(option: Any) -> None:
    doc = option.metadata["doc"]
    assert len(doc) > 15
    assert doc.endswith(".")
    assert "\n" not in doc


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_has_a_default_that_can_be_shown(option: Any) -> None:
    assert option.default is not dataclasses.MISSING
    shown = option.metadata["shown"]
    if option.default is not None and shown is None:
        assert len(str(option.default)) < 20


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_but_objects_can_be_given_in_the_environment(option: Any) -> None:
    assert (option.metadata["parse"] is None) == (option.name in OBJECTS)


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("db_engine", None),
        ("db_engine_url", None),
        ("schema", None),
        ("table_name", "outbox_table"),
        ("transport", None),
        ("unroutable", {}),
        ("routes", {}),
        ("exchange_name", "outbox"),
        ("queue_prefix", ""),
        ("rabbitmq_management_url", ""),
        ("source", None),
        ("webhook_secrets", None),
        ("poll_interval", timedelta(seconds=1)),
        ("lease", timedelta(seconds=60)),
        ("grace", timedelta(seconds=30)),
        ("expiration", None),
        ("clean_up_after", IMMEDIATELY),
        ("inbox_retention", timedelta(days=30)),
        ("max_body_size", 1024 * 1024),
    ],
)
def test_the_defaults_are_the_documented_ones(name: str, default: object) -> None:
    assert getattr(given(), name) == default


def test_listeners_are_retried_four_times_by_default_and_relays_without_end() -> None:
    settings, error = given(), ConnectionError()
    delays = [settings.policy("retry_delays").delay(attempt, error) for attempt in range(1, 6)]
    assert delays == [timedelta(seconds=1), timedelta(seconds=10), timedelta(minutes=1), timedelta(minutes=5), None]
    relay = settings.policy("relay_retry_delays")
    late = [relay.delay(attempt, error) for attempt in (20, 1000)]
    assert all(delay is not None and delay >= timedelta(minutes=4) for delay in late)


# Given in code.


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_of_the_transport_means_the_transport(name: str) -> None:
    assert given(**{name: "memory://"}).transport == "memory://"


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(SPELLINGS, 2)))
def test_the_same_thing_said_twice_is_fine_and_two_things_are_refused_by_name(first: str, second: str) -> None:
    assert given(**{first: "memory://a", second: "memory://a"}).transport == "memory://a"
    with pytest.raises(ConfigurationError, match=f"{first} and {second}"):
        given(**{first: "memory://a", second: "memory://b"})


@pytest.mark.parametrize("value", ["memory://", publish, MemoryTransport(), object()])
def test_none_for_one_spelling_leaves_the_other(value: object) -> None:
    assert given(transport=value, rabbitmq_url=None).transport is value


def test_an_unknown_option_is_refused_with_the_ones_there_are() -> None:
    with pytest.raises(ConfigurationError, match=r"'tabel_name'.*table_name"):
        given(tabel_name="orders")


def test_an_engine_and_a_url_are_two_ways_to_say_the_same() -> None:
    with pytest.raises(ConfigurationError, match=r"db_engine and db_engine_url"):
        given(db_engine=create_engine("sqlite://"), db_engine_url="sqlite://")


def test_an_engine_in_code_wins_over_a_url_in_the_environment() -> None:
    engine = create_engine("sqlite://")
    settings = Settings.of({"db_engine": engine}, {"OUTBOX_DB_ENGINE_URL": "sqlite:///elsewhere.db"})
    assert (settings.db_engine, settings.db_engine_url) == (engine, None)


@pytest.mark.parametrize("value", [IMMEDIATELY, NEVER, "IMMEDIATELY", "NEVER", "immediately", "never"])
def test_words_for_retention_are_taken_as_constants_or_text(value: str) -> None:
    assert given(clean_up_after=value).clean_up_after == value.upper()


@pytest.mark.parametrize(
    "value",
    [IMMEDIATELY, "immediately", "Immediately", pytest.param(timedelta(0), id="no time at all")],
)
def test_an_inbox_that_forgets_at_once_is_refused_however_it_is_said(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="inbox_retention"):
        given(inbox_retention=value)


def test_retry_delays_may_be_a_sequence_a_policy_or_a_function() -> None:
    policy = RetryPolicy.constant(3)
    assert given(retry_delays=policy).policy("retry_delays") is policy
    for value in ((3,), [timedelta(seconds=3)], lambda attempt, error: 3):
        assert given(retry_delays=value).policy("retry_delays").delay(1, KeyError()) == timedelta(seconds=3)
    assert given(retry_delays=()).policy("retry_delays").delay(1, KeyError()) is None


# Given in the environment.


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("db_engine_url", "sqlite:///orders.db", "sqlite:///orders.db"),
        ("schema", "shop", "shop"),
        ("table_name", "shop_outbox", "shop_outbox"),
        ("transport", "memory://", "memory://"),
        ("unroutable", '{"audit.#": "discard"}', {"audit.#": "discard"}),
        ("routes", '{"order.*": "https://a"}', {"order.*": "https://a"}),
        ("exchange_name", "shop", "shop"),
        ("queue_prefix", "eu.", "eu."),
        ("rabbitmq_management_url", "http://rabbit:15672", "http://rabbit:15672"),
        ("source", "https://shop.example/orders", "https://shop.example/orders"),
        ("poll_interval", "250ms", timedelta(milliseconds=250)),
        ("batch_size", "50", 50),
        ("prefetch_count", " 7 ", 7),
        ("lease", "90", timedelta(seconds=90)),
        ("grace", "0", timedelta(0)),
        ("expiration", "1h30m", timedelta(minutes=90)),
        ("clean_up_after", "never", NEVER),
        ("clean_up_after", "7d", timedelta(days=7)),
        ("inbox_retention", "90d", timedelta(days=90)),
        ("max_body_size", "2048", 2048),
    ],
)
def test_an_option_is_read_from_its_variable(name: str, text: str, expected: object) -> None:
    assert getattr(read(**{PREFIX + name.upper(): text}), name) == expected


@pytest.mark.parametrize("name", ["retry_delays", "relay_retry_delays"])
def test_retry_delays_are_read_from_a_list(name: str) -> None:
    policy = read(**{PREFIX + name.upper(): "100ms, 2,1m"}).policy(name)
    delays = [policy.delay(attempt, KeyError()) for attempt in range(1, 5)]
    assert delays == [timedelta(milliseconds=100), timedelta(seconds=2), timedelta(minutes=1), None]


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_has_a_variable(name: str) -> None:
    assert read(**{PREFIX + name.upper(): "memory://"}).transport == "memory://"


def test_two_variables_for_one_thing_are_refused_by_name_unless_they_agree() -> None:
    assert read(OUTBOX_TRANSPORT="memory://a", OUTBOX_RABBITMQ_URL="memory://a").transport == "memory://a"
    with pytest.raises(ConfigurationError, match="OUTBOX_TRANSPORT and OUTBOX_RABBITMQ_URL"):
        read(OUTBOX_TRANSPORT="memory://a", OUTBOX_RABBITMQ_URL="memory://b")


def test_code_wins_over_the_environment_under_any_spelling() -> None:
    settings = Settings.of({"transport": "memory://code"}, {"OUTBOX_RABBITMQ_URL": "memory://environment"})
    assert settings.transport == "memory://code"


def test_an_empty_variable_says_nothing() -> None:
    assert read(OUTBOX_TABLE_NAME="", OUTBOX_BATCH_SIZE="").table_name == "outbox_table"


def test_objects_are_not_read_from_text() -> None:
    assert read(OUTBOX_DB_ENGINE="sqlite://", OUTBOX_OBSERVERS="print", OUTBOX_REDACT_ERROR="str") is not None
    assert read(OUTBOX_OBSERVERS="print").observers is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("OUTBOX_BATCH_SIZE", "many"),
        ("OUTBOX_BATCH_SIZE", "1.5"),
        ("OUTBOX_BATCH_SIZE", "9" * 5000),
        ("OUTBOX_POLL_INTERVAL", "often"),
        ("OUTBOX_POLL_INTERVAL", "-1"),
        ("OUTBOX_LEASE", "nan"),
        ("OUTBOX_GRACE", "1e400"),
        ("OUTBOX_RETRY_DELAYS", "1,ten"),
        ("OUTBOX_CLEAN_UP_AFTER", "SOON"),
        ("OUTBOX_INBOX_RETENTION", "-1d"),
        ("OUTBOX_UNROUTABLE", "audit.#"),
        ("OUTBOX_UNROUTABLE", "[]"),
        ("OUTBOX_UNROUTABLE", "[" * 100_000),
        ("OUTBOX_MAX_BODY_SIZE", "1 MiB"),
        ("OUTBOX_WEBHOOK_SECRETS", CANARY),
        ("OUTBOX_WEBHOOK_SECRETS", f"whsec_{CANARY}"),
        ("OUTBOX_WEBHOOK_SECRETS", ","),
        ("OUTBOX_WEBHOOK_SECRETS_FILE", "/nowhere"),
        ("OUTBOX_WEBHOOK_SECRETS_FILE", "/"),
    ],
)
def test_a_bad_variable_is_refused_by_its_name(name: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=name) as raised:
        read(**{name: text})
    assert CANARY not in "".join(traceback.format_exception(raised.value))


ONE, OTHER = "whsec_" + "A" * 32, "whsec_" + "B" * 32


def signatures(settings: Settings) -> list[str]:
    secrets = settings.webhook_secrets
    assert isinstance(secrets, Secrets)
    return secrets.signatures(b"")


@pytest.mark.parametrize("text", [f"{ONE},{OTHER}", f" {ONE} , {OTHER} ", f"{ONE}\n{OTHER}\n", f"{ONE},\n{OTHER},"])
def test_webhook_secrets_are_read_from_a_variable_or_a_file(text: str, tmp_path: Path) -> None:
    expected = Secrets(ONE, OTHER).signatures(b"")
    file = tmp_path / "secrets"
    file.write_text(text)
    assert signatures(read(OUTBOX_WEBHOOK_SECRETS=text)) == expected
    assert signatures(read(OUTBOX_WEBHOOK_SECRETS_FILE=str(file))) == expected
    assert signatures(given(webhook_secrets=[ONE, OTHER])) == expected
    with pytest.raises(ConfigurationError, match="OUTBOX_WEBHOOK_SECRETS and OUTBOX_WEBHOOK_SECRETS_FILE"):
        read(OUTBOX_WEBHOOK_SECRETS=ONE, OUTBOX_WEBHOOK_SECRETS_FILE=str(file))


@pytest.mark.parametrize("text", ["\n", " \n\n", ",,"])
def test_a_file_without_a_webhook_secret_is_told_to_be_empty(text: str, tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=r"^OUTBOX_WEBHOOK_SECRETS_FILE: .*this one is empty"):
        read(OUTBOX_WEBHOOK_SECRETS_FILE=str(file))


def test_webhook_secrets_in_code_win_over_a_file() -> None:
    settings = Settings.of({"webhook_secrets": ONE}, {"OUTBOX_WEBHOOK_SECRETS_FILE": "/nowhere"})
    assert signatures(settings) == Secrets(ONE).signatures(b"")


def test_webhook_secrets_are_never_shown() -> None:
    settings = given(webhook_secrets=ONE)
    for shown in (repr(settings), str(settings), repr(vars(settings))):
        assert "AAAA" not in shown


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("the shop", "the%20shop"),
        ("/büro", "/b%C3%BCro"),
        ("/100%", "/100%25"),
        ("/50%25 off", "/50%25%20off"),
        ("1:shop", "1%3Ashop"),
        ("//[shop", "//%5Bshop"),
        ("/a#b#c", "/a%23b%23c"),
        ("<shop>", "%3Cshop%3E"),
    ],
)
def test_a_source_is_a_uri_reference_and_the_error_says_how_to_write_it(source: str, written: str) -> None:
    with pytest.raises(ConfigurationError, match=f"source.*URI-reference.*{re.escape(repr(written))}"):
        given(source=source)
    with pytest.raises(ConfigurationError, match="URI-reference"):
        Settings.of({}, {"OUTBOX_SOURCE": source})
    with pytest.raises(ConfigurationError, match="URI-reference"):
        HttpTransport("https://shop.example", source=source)
    assert given(source=written).source == written


@pytest.mark.parametrize(
    "source",
    [
        "/shop", "shop", "order-service", "#fragment", "?a=b/c?d", "//authority/path", "https://cloudevents.io",
        "https://user@shop.example:8443/a;b=c/,@:?x=1#y", "urn:uuid:6e8bc430-9c3a-11d9-9669-0800200c9a66",
        "mailto:cncf-wg-serverless@lists.cncf.io", "https://[::1]:80/x", "/caf%C3%A9", "a/b:c", "1-555-123-4567",
    ],
)  # fmt: skip
def test_every_uri_and_every_path_is_a_source(source: str) -> None:
    assert given(source=source).source == source


@pytest.mark.parametrize("source", ["", " \n", 7, "x" * 256, "a\r\nb"])
def test_a_source_is_a_short_printable_text(source: Any) -> None:
    with pytest.raises(ConfigurationError, match="source"):
        given(source=source)


@pytest.mark.parametrize(
    ("options", "service"),
    [
        ({"db_engine_url": "postgresql+asyncpg://u:p@host/orders"}, "/orders/outbox_table"),
        ({"db_engine_url": "postgresql://host/orders", "schema": "shop", "table_name": "t"}, "/orders/shop.t"),
        ({"db_engine_url": "sqlite+aiosqlite:////var/lib/shop/orders.db"}, "/orders.db/outbox_table"),
        ({"db_engine_url": "sqlite://"}, "/memory/outbox_table"),
        ({"db_engine_url": "postgresql://host/my%20orders"}, "/my%20orders/outbox_table"),
        ({"db_engine_url": "postgresql://host/my orders"}, "/my%20orders/outbox_table"),
        ({"db_engine_url": "postgresql://host/100%25"}, "/100%25/outbox_table"),
        ({"db_engine_url": "postgresql://host/my%2520orders"}, "/my%2520orders/outbox_table"),
        ({}, "/memory/outbox_table"),
    ],
)
def test_who_says_it_is_derived_from_what_all_processes_share(options: dict[str, str], service: str) -> None:
    assert given(**options).usual_source == service
    assert given(**options).source is None


def test_an_engine_names_the_service_as_its_url_does() -> None:
    assert given(db_engine=create_engine("sqlite:///orders.db")).usual_source == "/orders.db/outbox_table"


def test_a_process_configured_by_its_environment_needs_no_setup() -> None:
    script = "import outbox; print(outbox.outbox.settings.table_name, outbox.outbox.store.tables.messages.name)"
    environment = os.environ | {"OUTBOX_DB_ENGINE_URL": "sqlite://", "OUTBOX_TABLE_NAME": "shop"}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert (ran.stdout.strip(), ran.returncode) == ("shop shop", 0), ran.stderr


def test_without_setup_the_text_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in OPTIONS:
        monkeypatch.delenv(PREFIX + option.name.upper(), raising=False)
    with pytest.raises(ConfigurationError, match=r"setup\(db_engine_url=….*OUTBOX_DB_ENGINE_URL"):
        Outbox().settings  # noqa: B018 - asking is enough


# Setup.


def test_setup_does_no_input_or_output_and_needs_no_loop() -> None:
    outbox = Outbox(db_engine_url="postgresql+asyncpg://nobody@nowhere.invalid/none", transport="memory://")
    assert outbox.tables.messages.name == "outbox_table"
    assert outbox.transport.name == "memory"


def test_a_second_setup_keeps_what_it_does_not_name_and_makes_everything_anew() -> None:
    outbox = Outbox(db_engine_url="sqlite://", table_name="first", transport="memory://", retry_delays=(1,))
    store, transport = outbox.store, outbox.transport
    outbox.setup(table_name="second", retry_delays=None)
    assert (outbox.transport.name, outbox.settings.db_engine_url) == ("memory", "sqlite://")
    assert outbox.settings.policy("retry_delays").known_delays() == (timedelta(seconds=1),)
    assert outbox.tables.messages.name == "second"
    assert "second" in outbox.metadata.tables
    assert outbox.store is not store
    assert outbox.transport is not transport


def test_a_second_setup_may_replace_the_database_and_the_transport_however_they_were_named() -> None:
    engine = create_engine("sqlite://")
    outbox = Outbox(db_engine=engine, rabbitmq_url="amqp://first/")
    outbox.setup(retry_delays=(2,))
    assert (outbox.settings.db_engine, outbox.settings.transport) == (engine, "amqp://first/")
    outbox.setup(db_engine_url="sqlite+aiosqlite://", routes={"#": "memory://"})
    assert (outbox.settings.db_engine, outbox.settings.transport) == (None, None)
    outbox.setup(db_engine=engine, rmq_connection_url="amqp://second/")
    assert (outbox.settings.db_engine_url, outbox.settings.routes) == (None, {})
    assert outbox.settings.transport == "amqp://second/"
    outbox.setup(transport="database")
    assert outbox.transport.name == "database"
    assert outbox.settings.policy("retry_delays").known_delays() == (timedelta(seconds=2),)


def test_a_setup_that_is_refused_changes_nothing() -> None:
    outbox = Outbox(db_engine_url="sqlite://", table_name="first")
    for bad in ({"table_name": "a;b"}, {"no_option": 1}, {"db_engine": create_engine("sqlite://"), "batch_size": 0}):
        with pytest.raises(ConfigurationError):
            outbox.setup(**bad)
    outbox.setup(lease=30)
    assert (outbox.settings.table_name, outbox.settings.db_engine_url) == ("first", "sqlite://")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"table_name": "a;b"}, id="a table that is no name"),
        pytest.param({"table_name": 5}, id="a table that is a number"),
        pytest.param({"schema": "a b"}, id="a schema that is no name"),
        pytest.param({"db_engine": "sqlite://"}, id="an engine that is a URL"),
        pytest.param({"db_engine": object()}, id="an engine that is no engine"),
        pytest.param({"db_engine_url": 5}, id="a URL that is a number"),
        pytest.param({"exchange_name": ""}, id="an exchange without a name"),
        pytest.param({"exchange_name": 5}, id="an exchange that is a number"),
        pytest.param({"queue_prefix": "two\nlines"}, id="a prefix of two lines"),
        pytest.param({"unroutable": "audit.#"}, id="unroutable as text"),
        pytest.param({"unroutable": ["audit.#"]}, id="unroutable as a list"),
        pytest.param({"unroutable": 5}, id="unroutable as a number"),
        pytest.param({"unroutable": {5: "discard"}}, id="a number for a binding key"),
        pytest.param({"unroutable": {"": "discard"}}, id="an empty binding key"),
        pytest.param({"unroutable": {"audit.#": "drop"}}, id="an action there is not"),
        pytest.param({"unroutable": {"audit.#": None}}, id="no action"),
        pytest.param({"routes": "https://a"}, id="routes as text"),
        pytest.param({"routes": {"": "https://a"}}, id="an empty binding key of a route"),
        pytest.param({"routes": {5: "https://a"}}, id="a number for a binding key of a route"),
        pytest.param({"poll_interval": 0}, id="no pause"),
        pytest.param({"poll_interval": math.nan}, id="a pause that is no number"),
        pytest.param({"poll_interval": "1"}, id="a pause as text"),
        pytest.param({"poll_interval": 10**400}, id="a pause without end"),
        pytest.param({"batch_size": 0}, id="an empty batch"),
        pytest.param({"batch_size": True}, id="a batch that is a truth"),
        pytest.param({"batch_size": 1.0}, id="a batch that is a float"),
        pytest.param({"prefetch_count": -1}, id="a negative prefetch"),
        pytest.param({"max_body_size": "1 MiB"}, id="a size as text"),
        pytest.param({"lease": timedelta(0)}, id="a lease of nothing"),
        pytest.param({"grace": -1}, id="a negative grace"),
        pytest.param({"expiration": 0}, id="an expiration of nothing"),
        pytest.param({"clean_up_after": 7}, id="a number where a unit is needed"),
        pytest.param({"clean_up_after": "SOON"}, id="a word there is not"),
        pytest.param({"clean_up_after": timedelta(days=-1)}, id="a negative retention"),
        pytest.param({"retry_delays": "1,10"}, id="delays as text"),
        pytest.param({"retry_delays": (1, -10)}, id="a negative delay"),
        pytest.param({"relay_retry_delays": ("1",)}, id="a delay as text"),
        pytest.param({"observers": 5}, id="observers that are a number"),
        pytest.param({"observers": print}, id="an observer without a list"),
        pytest.param({"observers": ["print"]}, id="an observer by its name"),
        pytest.param({"redact_error": "secret"}, id="a redaction by its name"),
    ],
)
def test_what_cannot_work_is_said_by_setup_with_the_options_name(options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(ConfigurationError, match=name.removeprefix("relay_")):
        Outbox(**options)


def test_a_url_object_of_sqlalchemy_is_a_url() -> None:
    outbox = Outbox(db_engine_url=create_async_engine("sqlite+aiosqlite://").url)
    assert outbox.tables.messages.name == "outbox_table"


# Credentials.


def everything_shown(action: Callable[[], object]) -> str:
    """What a log would have of the error that an action ends with."""
    try:
        action()
    except OutboxError as error:
        return "".join(traceback.format_exception(error))
    raise AssertionError("it did not raise")


@pytest.mark.parametrize(
    "action",
    [
        pytest.param(lambda: Outbox(db_engine_url=f"oracle://u:{CANARY}@h/d").store, id="no store"),
        pytest.param(lambda: Outbox(db_engine_url=f"oracle+x://u:{CANARY}@h/d").store, id="no store with a driver"),
        pytest.param(lambda: Outbox(db_engine_url=f"u:{CANARY}@h/d").store, id="no scheme"),
        pytest.param(lambda: Outbox(db_engine_url=f"//u:{CANARY}@h/d").store, id="an empty scheme"),
        pytest.param(lambda: Outbox(db_engine_url=f"postgresql://u@h:{CANARY}/d").store, id="a password for a port"),
        pytest.param(lambda: Outbox(db_engine_url=f"postgresql://h:{CANARY}").store, id="a port that is a password"),
        pytest.param(lambda: Outbox(transport=f"kafka://u:{CANARY}@h").transport, id="no transport"),
        pytest.param(lambda: Outbox(transport=f"u:{CANARY}@h").transport, id="no transport scheme"),
        pytest.param(
            lambda: Outbox(transport=f"amqp://u:{CANARY}@a", rabbitmq_url=f"amqp://u:{CANARY}@b"), id="given twice"
        ),
        pytest.param(lambda: read(OUTBOX_TRANSPORT=f"a:{CANARY}", OUTBOX_RMQ_CONNECTION_URL=f"b:{CANARY}"), id="twice"),
        pytest.param(lambda: given(pasword=CANARY), id="an unknown option"),
        pytest.param(
            lambda: given(db_engine=create_engine("sqlite://"), db_engine_url=f"postgresql://u:{CANARY}@h"),
            id="an engine and a URL",
        ),
    ],
)
def test_no_error_shows_a_password(action: Callable[[], object]) -> None:
    # The lines of source in a traceback hold the word CANARY, never what it stands for.
    assert CANARY not in everything_shown(action)


def test_nothing_made_from_settings_shows_a_password_when_it_is_printed() -> None:
    url = f"postgresql+asyncpg://u:{CANARY}@h/d"
    outbox = Outbox(db_engine_url=url, transport=f"memory://u:{CANARY}@h")
    parts: list[object] = [outbox, outbox.settings, outbox.engines, outbox.store, outbox.transport]
    parts += [outbox.engines.main, outbox.engines.main.url, outbox.metadata, outbox.tables]
    assert CANARY not in "".join(f"{part!r} {part}" for part in parts)


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_a_server_that_is_away_is_reported_without_the_password(driver: str, unused_tcp_port: int) -> None:
    outbox = Outbox(db_engine_url=f"postgresql+{driver}://u:{CANARY}@127.0.0.1:{unused_tcp_port}/d")
    with pytest.raises(Exception, match=r"(?i)connect") as caught:
        await outbox.create_tables()
    await outbox.close()
    assert CANARY not in "".join(traceback.format_exception(caught.value))


def test_a_variable_that_is_no_option_is_reported_once_with_the_nearest_name(caplog: pytest.LogCaptureFixture) -> None:
    variables = {"OUTBOX_GRACEE": "3", "OUTBOX_DB_URL": "sqlite://", "OUTBOX_ZZZZZZ": "1", "OUTBOX_GRACE": "3"}
    for _ in range(2):
        Settings.of({}, environment=variables)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "the variable OUTBOX_DB_URL is ignored: did you mean OUTBOX_DB_ENGINE_URL?",
        "the variable OUTBOX_GRACEE is ignored: did you mean OUTBOX_GRACE?",
        "the variable OUTBOX_ZZZZZZ is ignored: outbox has no option of that name",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "OUTBOX_RABBITMQ_URL",
        "OUTBOX_WEBHOOK_SECRETS_FILE",
        "OUTBOX_TEST_POSTGRESQL_URL",
        "OUTBOX_PORT",  # this and the next ones are made by Kubernetes for a service
        "OUTBOX_PORT_80_TCP_ADDR",
        "OUTBOX_RELAY_SERVICE_HOST",
        "OUTBOX_SERVICE_PORT_HTTP",
        "MY_OUTBOX_GRACEE",
    ],
)
def test_a_variable_that_means_something_is_not_reported(name: str, caplog: pytest.LogCaptureFixture) -> None:
    environment.report_unknown(Settings, {name: "x"})
    assert not caplog.records
