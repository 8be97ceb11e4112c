"""What all transports have in common: a base class, features that are declared, and options of their own."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import outbox
from outbox import ConfigurationError, Listener, Outbox
from outbox.core.transport import Consumer, Defaults, Delivery, Features, Transport, check_features
from outbox.settings import Settings
from outbox.transports.database import DatabaseTransport
from outbox.transports.function import FunctionTransport
from outbox.transports.http import HttpTransport
from outbox.transports.http.options import HttpOptions
from outbox.transports.memory import MemoryTransport
from outbox.transports.rabbitmq import RabbitmqTransport
from outbox.transports.rabbitmq.options import RabbitmqOptions
from outbox.transports.routes import Routes

SOURCES = Path(outbox.__file__).parent
PAGE = SOURCES.parents[1] / "docs/extend/transport.md"
CONCRETE = (DatabaseTransport, FunctionTransport, HttpTransport, MemoryTransport, RabbitmqTransport, Routes)
NAMES = {kind.__name__ for kind in CONCRETE}


def asked_for(tree: ast.AST) -> set[str]:
    """The names that `isinstance` is called with."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    isinstances = (call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "isinstance")
    return {node.id for call in isinstances for node in ast.walk(call.args[1]) if isinstance(node, ast.Name)}


def test_nothing_outside_of_its_folder_asks_for_a_concrete_transport() -> None:
    files = [path for path in SOURCES.rglob("*.py") if path.parent.name != "transports"]
    found = {str(path): asked_for(ast.parse(path.read_text())) & NAMES for path in files}
    assert {path: names for path, names in found.items() if names} == {}


def test_the_page_for_new_transports_tells_of_every_feature_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (True|False|None) \|", PAGE.read_text(), re.MULTILINE)
    assert rows == [(each.name, str(each.default)) for each in fields(Features)]


def test_every_feature_has_a_line_that_says_what_it_means() -> None:
    source = inspect.getsource(Features)
    for each in fields(Features):
        assert re.search(rf"^    {each.name}: .+ = .+  # \w.+", source, re.MULTILINE), each.name


@pytest.mark.parametrize("options", [RabbitmqOptions, HttpOptions])
def test_the_options_of_a_transport_are_settings(options: type[Any]) -> None:
    assert {each.name for each in fields(options)} <= {each.name for each in fields(Settings)}


def test_no_option_of_a_single_transport_is_in_the_core() -> None:
    of_transports = {each.name for options in (RabbitmqOptions, HttpOptions) for each in fields(options)}
    assert not of_transports & {each.name for each in fields(Defaults)}


def test_a_transport_takes_its_own_options_and_leaves_the_rest() -> None:
    defaults = Defaults(settings={"exchange_name": "shop", "source": "/shop", "grace": 1})
    assert defaults.chosen(RabbitmqOptions) == RabbitmqOptions(exchange_name="shop")
    assert defaults.chosen(HttpOptions) == HttpOptions(source="/shop")


def test_the_settings_reach_the_transport_that_is_made_from_a_url() -> None:
    transport = Outbox(rabbitmq_url="amqp://localhost/", queue_prefix="eu.").transport
    assert transport.queue_name("billing") == "eu.billing"


# A transport that has nothing but the defaults.


class Bare(Transport):
    name = "bare"
    features = Features(consumes=False, delays=False, keeps_dead_letters=False)

    async def publish(self, messages: Any, report: Any = None) -> Any: ...


async def test_what_is_not_overridden_is_not_there() -> None:
    transport = Bare()
    await transport.open()
    await transport.back()
    assert transport.queue_name("billing") == "billing"
    assert await transport.counted(()) is None
    assert await transport.examine() == ()
    async with transport.watched() as asked:
        assert asked is None, "nothing is known of its health"
    with pytest.raises(ConfigurationError, match="'bare' only publishes"):
        await transport.declare([])
    with pytest.raises(ConfigurationError, match="'bare' only publishes"):
        transport.consume(Listener("a", print, queue="q"), 1)
    with pytest.raises(ConfigurationError, match="nothing that could be provisioned"):
        transport.topology([])
    await transport.close()


def test_a_transport_that_does_not_publish_is_none() -> None:
    with pytest.raises(TypeError, match="publish"):
        type("Nothing", (Transport,), {"name": "nothing"})()
    with pytest.raises(TypeError, match="settle"):
        type("Nothing", (Delivery,), {})()
    with pytest.raises(TypeError, match="__anext__"):
        type("Nothing", (Consumer,), {})()


# A log has no wildcards and acknowledges no single message.


class Log(Bare):
    name = "log"
    features = Features(wildcards=False, acknowledges_individually=False, keeps_order=True, delays=False)


@pytest.mark.parametrize("binding_key", ["#", "order.*", "order.#"])
def test_a_wildcard_is_refused_where_there_are_none(binding_key: str) -> None:
    with pytest.raises(ConfigurationError, match="'log' knows no wildcards"):
        check_features(Log(), [Listener(binding_key, print, queue="q", store_first=True)])


def test_a_listener_stores_first_where_single_messages_are_not_acknowledged() -> None:
    check_features(Log(), [Listener("order.created", print, queue="q", store_first=True)])
    with pytest.raises(ConfigurationError, match="store_first=True"):
        check_features(Log(), [Listener("order.created", print, queue="q")])


async def test_a_worker_says_so_when_it_starts(tmp_path: Path) -> None:
    outbox = Outbox(db_engine_url=f"sqlite+aiosqlite:///{tmp_path / 'outbox.db'}", transport=Log(), log=False)
    with pytest.raises(ConfigurationError, match="'log' knows no wildcards"):
        async with outbox.running(listeners=[Listener("#", print, queue="q")]):
            pass
    await outbox.close()
