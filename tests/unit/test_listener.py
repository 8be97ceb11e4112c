"""Listeners: a callback with the binding key and the queue it listens on."""

import functools
import inspect
import warnings
from datetime import timedelta
from typing import Any

import pytest

from outbox import Binding, ConfigurationError, Listener, Outbox, RetryPolicy, listen
from outbox.core.listener import check_listeners


async def on_order(order: object) -> object:
    return order


class Handler:
    async def __call__(self, order: object) -> None: ...

    async def on_order(self, order: object) -> None: ...


def test_listen_makes_the_listener_that_the_class_makes() -> None:
    options: dict[str, Any] = {
        "queue": "billing",
        "retry_delays": (1, 2),
        "concurrency": 3,
        "timeout": 4,
        "lease": 5,
        "max_crashes": 6,
    }
    assert listen("order.created", **options)(on_order) == Listener("order.created", on_order, **options)


def test_every_option_of_a_listener_is_an_option_of_listen() -> None:
    of_class = list(inspect.signature(Listener).parameters.values())
    of_listen = list(inspect.signature(listen).parameters.values())
    named = [(each.name, each.default) for each in of_class if each.name != "callback"]
    assert [(each.name, each.default) for each in of_listen] == named


async def test_a_listener_can_still_be_called_as_the_function_it_was() -> None:
    assert await listen("order.created")(on_order)({"id": 1}) == {"id": 1}


def test_options_are_turned_into_durations_and_policies() -> None:
    listener = Listener("order.created", on_order, retry_delays=(1, 2), timeout=1.5, lease=timedelta(minutes=1))
    assert listener.retry_policy is not None
    assert listener.retry_policy.delay(2, ValueError()) == timedelta(seconds=2)
    assert (listener.time_limit, listener.lease_time) == (timedelta(seconds=1.5), timedelta(minutes=1))
    assert listener.binding == Binding(listener.queue, "order.created")


def test_what_is_not_said_is_left_to_the_settings() -> None:
    listener = Listener("order.created", on_order)
    assert (listener.retry_policy, listener.time_limit, listener.lease_time) == (None, None, None)


@pytest.mark.parametrize(
    ("callback", "ending"),
    [
        pytest.param(on_order, "test_listener.on_order", id="a function"),
        pytest.param(Handler().on_order, "test_listener.Handler.on_order", id="a method"),
        pytest.param(Handler(), "test_listener.Handler", id="a callable object"),
        pytest.param(functools.partial(on_order), "test_listener.on_order", id="a partial"),
    ],
)
def test_a_queue_is_named_after_the_callbacks_module_and_name(callback: Any, ending: str) -> None:
    assert Listener("order.created", callback).queue.endswith(ending)


def test_a_function_inside_a_function_has_a_queue_that_brokers_take() -> None:
    async def inner(order: object) -> None: ...

    assert "<" not in Listener("order.created", inner).queue


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"retry_delays": [1, 10]}, id="a list of delays"),
        pytest.param({"retry_delays": RetryPolicy.constant(1, only=[OSError])}, id="a policy"),
        pytest.param({"retry_delays": lambda attempt, error: None}, id="a function"),
    ],
)
def test_a_listener_can_be_a_key_whatever_its_options(options: dict[str, Any]) -> None:
    listener = Listener("order.created", on_order, **options)
    assert {listener: "handling"}[listener] == "handling"


def test_a_listener_is_a_declaration_that_nobody_changes() -> None:
    listener = Listener("order.created", on_order)
    with pytest.raises(AttributeError):
        listener.queue = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"callback": None}, id="no callback"),
        pytest.param({"callback": "on_order"}, id="a callback by its name"),
        pytest.param({"binding_key": ""}, id="an empty binding key"),
        pytest.param({"binding_key": None}, id="no binding key"),
        pytest.param({"binding_key": "a" * 256}, id="a long binding key"),
        pytest.param({"binding_key": "a\nb"}, id="a line break in a binding key"),
        pytest.param({"queue": 5}, id="a queue that is a number"),
        pytest.param({"queue": b"billing"}, id="a queue in bytes"),
        pytest.param({"queue": "q" * 256}, id="a long queue"),
        pytest.param({"queue": "a\x00b"}, id="a NUL in a queue"),
        pytest.param({"queue": "\ud800"}, id="half a character in a queue"),
        pytest.param({"concurrency": 0}, id="no concurrency"),
        pytest.param({"concurrency": -1}, id="negative concurrency"),
        pytest.param({"concurrency": True}, id="concurrency that is a truth"),
        pytest.param({"concurrency": 1.5}, id="one and a half at a time"),
        pytest.param({"concurrency": "8"}, id="concurrency as text"),
        pytest.param({"concurrency": None}, id="concurrency of none"),
        pytest.param({"max_crashes": 0}, id="no crashes"),
        pytest.param({"max_crashes": "3"}, id="crashes as text"),
        pytest.param({"max_crashes": None}, id="crashes of none"),
        pytest.param({"timeout": 0}, id="no time"),
        pytest.param({"timeout": -1}, id="negative time"),
        pytest.param({"timeout": "15s"}, id="time as text"),
        pytest.param({"timeout": float("nan")}, id="time that is no number"),
        pytest.param({"lease": 0}, id="no lease"),
        pytest.param({"lease": True}, id="a lease that is a truth"),
        pytest.param({"retry_delays": "1,10"}, id="delays as text"),
        pytest.param({"retry_delays": 5}, id="one delay"),
        pytest.param({"retry_delays": (1, -1)}, id="a negative delay"),
        pytest.param({"retry_delays": (1, "10")}, id="a delay as text"),
    ],
)
def test_a_listener_that_cannot_work_is_refused_when_it_is_made(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Listener(**{"binding_key": "order.created", "callback": on_order, **options})


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("a.b#", "'b#' is an ordinary word"),
        ("order*", "one whole word"),
        ("*.*x", r"'\*x' is an ordinary word"),
        ("##", "any number of them"),
        ("a..b", "empty word"),
        (".a", "empty word"),
        ("a.", "none at an end"),
        (".", "empty word"),
    ],
)
def test_a_binding_key_that_never_matches_is_refused_with_the_reason(key: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        listen(key)
    with pytest.raises(ConfigurationError, match=reason):
        Listener(key, print, queue="q")
    with pytest.raises(ConfigurationError, match=f"binding key of unroutable .*{reason}"):
        Outbox(db_engine_url="sqlite://", unroutable={key: "discard"})
    with pytest.raises(ConfigurationError, match=f"binding key of routes .*{reason}"):
        Outbox(db_engine_url="sqlite://", routes={key: "https://billing.example/hook"})


@pytest.mark.parametrize("key", ["#", "*", "order.*", "#.paid.*", "a b.c", "日本.*"])
def test_a_binding_key_of_whole_words_is_taken(key: str) -> None:
    assert Listener(key, print, queue="q").binding_key == key


def test_listen_without_a_binding_key_says_what_is_missing() -> None:
    with pytest.raises(ConfigurationError):
        listen(on_order)  # type: ignore[arg-type]


def test_two_listeners_on_one_queue_are_refused_by_its_name() -> None:
    listeners = [Listener("order.created", on_order, queue="billing"), Listener("order.*", Handler(), queue="billing")]
    with pytest.raises(ConfigurationError, match="'billing'"):
        check_listeners(listeners)


@pytest.mark.parametrize(
    "listeners",
    [
        pytest.param([], id="none"),
        pytest.param([on_order], id="a plain function"),
        pytest.param([None], id="a list of nothing"),
        pytest.param(Listener("order.created", on_order), id="one listener without a list"),
    ],
)
def test_what_a_worker_cannot_serve_is_refused(listeners: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"listener|Listener"):
        check_listeners(listeners)


def test_a_queue_named_after_main_is_warned_about_because_it_will_not_last() -> None:
    with pytest.warns(UserWarning, match=r"'__main__\.on_order'.*queue="):
        check_listeners([Listener("order.created", on_order, queue="__main__.on_order")])


def test_a_queue_of_its_own_name_is_not_warned_about() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_listeners([Listener("order.created", on_order), Listener("order.*", Handler())])
