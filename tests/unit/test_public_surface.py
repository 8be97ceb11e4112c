"""The public surface: the promised names, each with a word about it, and none by accident."""

import inspect
import pkgutil
import tomllib
import types
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import outbox
from outbox import Outbox

FIRST = ("setup", "emit", "message_relay", "listen", "Listener", "worker", "Reject", "tracking", "get_tracking_ids")
LATER = ("emit_many", "emit_sync", "cancel_timer", "transaction", "running", "RetryPolicy", "Message", "DeadLetter")
OTHER = ("Outbox", "outbox", "IMMEDIATELY", "NEVER")
TWINS = ("emit", "emit_many", "cancel_timer")


@pytest.mark.parametrize("name", FIRST + LATER + OTHER)
def test_a_promised_name_can_be_imported_from_the_package(name: str) -> None:
    assert name in outbox.__all__
    assert getattr(outbox, name) is not None


def test_the_list_of_names_is_sorted_complete_and_without_repetition() -> None:
    assert len(outbox.__all__) == len(set(outbox.__all__))
    public = {
        name
        for name, value in vars(outbox).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public == set(outbox.__all__)


@pytest.mark.parametrize("name", sorted(set(outbox.__all__) - {"IMMEDIATELY", "NEVER"}))
def test_a_public_name_says_in_a_sentence_what_it_is(name: str) -> None:
    value = getattr(outbox, name)
    doc = (type(value) if name == "outbox" else value).__doc__ or ""
    assert doc.strip().endswith((".", "…)`.")), doc
    assert not doc.startswith(f"{name}("), "a dataclass without a docstring shows its signature instead"
    if inspect.isclass(value):
        assert "__doc__" in vars(value), "inherited words speak of something else"


def public_methods(owner: type) -> list[Any]:
    return [
        pytest.param(value, id=f"{owner.__name__}.{name}")
        for name, value in inspect.getmembers_static(owner)
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, classmethod))
    ]


@pytest.mark.parametrize("method", public_methods(Outbox) + public_methods(outbox.RetryPolicy))
def test_a_public_method_says_what_it_does(method: Any) -> None:
    assert (inspect.getdoc(method) or "").strip()


@pytest.mark.parametrize("method", public_methods(Outbox))
def test_a_public_method_is_fully_annotated(method: Any) -> None:
    signature = inspect.signature(method)
    assert signature.return_annotation is not inspect.Signature.empty
    for name, parameter in signature.parameters.items():
        assert name == "self" or parameter.annotation is not inspect.Parameter.empty


def test_no_module_hides_a_public_name() -> None:
    modules = {module.name for module in pkgutil.iter_modules(outbox.__path__)}
    assert not modules & set(outbox.__all__)


def test_the_functions_of_the_package_belong_to_its_one_instance() -> None:
    twins = [f"{name}_sync" for name in TWINS]
    for name in (
        *TWINS,
        *twins,
        "setup",
        "transaction",
        "transaction_sync",
        "transactional",
        "receive",
        "receive_sync",
        "after_commit",
        "message_relay",
        "worker",
        "running",
        "backlog",
        "create_tables",
        "check_tables",
    ):
        assert getattr(outbox, name).__self__ is outbox.outbox


@pytest.mark.parametrize("name", ["metadata", "dead_letters"])
def test_what_depends_on_setup_is_looked_up_when_it_is_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    instance = Outbox(db_engine_url="sqlite://", table_name="late")
    monkeypatch.setattr(outbox, "outbox", instance)
    assert getattr(outbox, name) is getattr(instance, name)


def test_a_name_that_does_not_exist_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        outbox.no_such_name  # type: ignore[attr-defined] # noqa: B018 - asking is enough


@pytest.mark.parametrize(("asynchronous", "plain"), [(name, f"{name}_sync") for name in TWINS])
def test_a_function_and_its_twin_without_a_loop_take_the_same_arguments(asynchronous: str, plain: str) -> None:
    one, other = (inspect.signature(getattr(Outbox, name)) for name in (asynchronous, plain))
    assert [(each.name, each.kind, each.default) for each in one.parameters.values()] == [
        (each.name, each.kind, each.default) for each in other.parameters.values()
    ]
    assert one.return_annotation == other.return_annotation
    assert inspect.iscoroutinefunction(getattr(Outbox, asynchronous))
    assert not inspect.iscoroutinefunction(getattr(Outbox, plain))


def test_emit_takes_the_documented_arguments() -> None:
    names = list(inspect.signature(Outbox.emit).parameters)
    assert names[:4] == ["self", "session", "routing_key", "body"]
    assert set(names[4:]) >= {"key", "headers", "eta", "expiration", "timer_id", "content_type"}


def test_listen_takes_the_documented_options() -> None:
    names = set(inspect.signature(outbox.listen).parameters)
    assert names >= {"binding_key", "queue", "retry_delays", "concurrency", "timeout", "lease", "max_crashes"}


def test_the_package_is_typed_for_its_users() -> None:
    assert files("outbox").joinpath("py.typed").is_file()


def test_the_package_says_the_version_that_is_built() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert outbox.__version__ == project["version"] == version("transactional-outbox")
