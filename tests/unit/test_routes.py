"""What a route is called, and which routes cannot be."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from outbox import ConfigurationError, Message, Outbox
from outbox.adapters import routes_for
from outbox.core.binding import LONGEST_KEY
from outbox.core.transport import Defaults
from outbox.settings import Settings
from outbox.transports.function import FunctionTransport
from outbox.transports.memory import MemoryTransport
from outbox.transports.routes import route_name


async def billing(message: Message) -> None: ...


class Named(MemoryTransport):
    def __init__(self, route: str) -> None:
        super().__init__()
        self.route = route


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://shop.example/hook", "https://shop.example/hook"),
        ("https://user:secret@shop.example:8443/hook?token=secret#top", "https://shop.example:8443/hook"),
        ("https://user:se@cret@shop.example", "https://shop.example"),
        ("https://[::1]:80/", "https://[::1]:80/"),
    ],
)
def test_a_route_is_called_by_its_url_without_secrets(url: str, name: str) -> None:
    assert route_name(url, MemoryTransport()) == name


def test_a_transport_may_say_what_its_route_is_called() -> None:
    assert route_name("https://shop.example", Named("shop")) == "shop"


def test_a_function_gives_its_route_its_own_name() -> None:
    assert [route.name for route in routes_for({"#": billing}).routes] == ["billing"]


@pytest.mark.parametrize("function", [partial(billing), lambda message: billing(message)], ids=["partial", "lambda"])
def test_a_function_without_a_name_cannot_be_a_route(function: Any) -> None:
    with pytest.raises(ConfigurationError, match="has no name: write a function with `async def`"):
        route_name(function, FunctionTransport(function))


def test_a_transport_without_a_name_cannot_be_a_route() -> None:
    with pytest.raises(ConfigurationError, match="an attribute `route`"):
        routes_for({"#": MemoryTransport()})


def test_a_name_has_to_fit_into_its_column() -> None:
    longest = "a" * LONGEST_KEY
    assert routes_for({"#": Named(longest)}).routes[0].name == longest
    for name in (longest + "a", "", "a\nb"):
        with pytest.raises(ConfigurationError, match="name of a route"):
            routes_for({"#": Named(name)})


def test_one_destination_with_several_keys_is_one_route() -> None:
    shop = Named("shop")
    [url, named] = routes_for({"a": "memory://", "b": shop, "c": "memory://", "d": shop}).routes
    assert (url.name, url.binding_keys, named.binding_keys) == ("memory://", ("a", "c"), ("b", "d"))


@pytest.mark.parametrize(
    "routes",
    [
        {"a": Named("shop"), "b": Named("shop")},
        {"a": "memory://one@shop", "b": "memory://two@shop"},
        {"a": "memory://shop?a", "b": "memory://shop?b"},
    ],
)
def test_two_destinations_with_one_name_are_refused(routes: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="two routes are called"):
        routes_for(routes)


@pytest.mark.parametrize("value", [5, None, "nowhere://shop"])
def test_a_route_leads_to_a_url_a_transport_or_a_function(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"^the route of 'order\.\*': "):
        routes_for({"#": "memory://", "order.*": value})


def test_an_argument_comes_before_a_variable_for_the_other_way_to_say_it() -> None:
    transport = Settings.of({"transport": "memory://"}, {"OUTBOX_ROUTES": '{"#": "memory://"}'})
    assert (transport.transport, transport.routes) == ("memory://", {})
    routes = Settings.of({"routes": {"#": "memory://"}}, {"OUTBOX_RABBITMQ_URL": "amqp://host"})
    assert (routes.transport, routes.routes) == (None, {"#": "memory://"})
    with pytest.raises(ConfigurationError, match="transport and routes"):
        Settings.of({"routes": {"#": "memory://"}, "transport": "memory://"}, {})
    with pytest.raises(ConfigurationError, match="transport and routes"):
        Settings.of({}, {"OUTBOX_ROUTES": '{"#": "memory://"}', "OUTBOX_TRANSPORT": "memory://"})


def test_secrets_in_routes_are_not_shown() -> None:
    outbox = Outbox(db_engine_url="sqlite+aiosqlite://", routes={"#": "memory://user:secret@host"})
    assert "secret" not in repr(outbox.settings) + repr(outbox.transport)
    [route] = outbox.transport.routes
    assert "secret" not in repr(route)


@pytest.mark.parametrize("given", [({"routes": {}}, {}), ({}, {"OUTBOX_ROUTES": "{}"})], ids=["argument", "variable"])
def test_routes_to_nowhere_are_not_taken_for_the_database(given: tuple[dict[str, object], dict[str, str]]) -> None:
    with pytest.raises(ConfigurationError, match="routes names no destination"):
        Settings.of(*given)


@pytest.mark.parametrize(
    ("second", "interface"),
    [("amqp://guest@one/other", "http://one:15672"), ("amqp://guest@two/", "")],
    ids=["one broker", "two brokers"],
)
def test_the_interface_of_one_broker_is_not_asked_about_another(second: str, interface: str) -> None:
    defaults = Defaults(settings={"rabbitmq_management_url": "http://one:15672"})
    routes = routes_for({"a": "amqp://guest@one/", "b": second, "c": "https://shop.example"}, defaults).routes
    asked = [getattr(route.transport, "_management_url", None) for route in routes]
    assert asked == [interface, interface, None]
