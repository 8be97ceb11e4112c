"""Errors: the tree that the documentation draws is the tree in the code."""

import importlib
import inspect
import pkgutil
import re

import pytest

import outbox
from outbox.core import errors

LINE = re.compile(r"^(?P<indent>[│├└─ ]*)(?P<name>\w+)(?: \((?P<also>\w+)\))?(?:  +(?P<about>\S.*))?$")


def drawn() -> dict[str, tuple[str | None, str | None]]:
    """Each name of the drawing with the one it hangs under, and the built-in error it also is."""
    tree: dict[str, tuple[str | None, str | None]] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines()[2:]:
        found = LINE.match(line)
        if found is None:
            continue
        depth = len(found["indent"])
        above = [(indent, name) for indent, name in above if indent < depth]
        tree[found["name"]] = (above[-1][1] if above else None, found["also"])
        above.append((depth, found["name"]))
    return tree


def raised_on_purpose() -> dict[str, type[BaseException]]:
    """Every exception class that the library defines as an OutboxError, and those for listeners and warnings."""
    for module in pkgutil.walk_packages(outbox.__path__, "outbox."):
        if not module.name.startswith(("outbox.testing", "outbox.cli", "outbox.__main__")):
            importlib.import_module(module.name)
    found: dict[str, type[BaseException]] = {each.__name__: each for each in (errors.Reject, errors.NotAtomicWarning)}
    left: list[type[BaseException]] = [errors.OutboxError]
    while left:
        error = left.pop()
        if error.__module__.startswith("outbox.") and not error.__module__.startswith("outbox.testing."):
            found[error.__name__] = error
        left += error.__subclasses__()
    return found


TREE = drawn()


def test_the_drawing_is_not_empty() -> None:
    assert TREE["OutboxError"] == (None, None)
    assert TREE["TransportMismatch"] == ("ConfigurationError", None)
    assert TREE["MessageError"] == ("OutboxError", "ValueError")
    assert len(TREE) >= 15


def test_the_drawing_shows_every_error_and_no_other() -> None:
    assert set(TREE) == set(raised_on_purpose())


@pytest.mark.parametrize("name", TREE)
def test_an_error_hangs_where_the_drawing_says(name: str) -> None:
    error = getattr(errors, name)
    parent, also = TREE[name]
    bases = [base.__name__ for base in error.__bases__]
    expected = [each for each in (parent, also) if each is not None]
    assert bases == expected if expected else bases in (["Exception"], ["UserWarning"])


@pytest.mark.parametrize("name", TREE)
def test_an_error_is_public_and_says_what_it_means(name: str) -> None:
    error = getattr(errors, name)
    assert getattr(outbox, name) is error
    assert name in outbox.__all__
    assert error.__doc__
    assert error.__doc__.endswith(".")


@pytest.mark.parametrize("name", TREE)
def test_an_error_can_be_caught_by_its_root(name: str) -> None:
    error = getattr(outbox, name)
    rooted = issubclass(error, outbox.OutboxError)
    assert rooted == (name not in ("Reject", "NotAtomicWarning"))
    assert issubclass(error, Exception)


def test_a_listener_cannot_catch_a_rejection_by_mistake_as_an_error_of_the_library() -> None:
    assert not issubclass(outbox.Reject, outbox.OutboxError)
    assert not inspect.isabstract(outbox.Reject)
