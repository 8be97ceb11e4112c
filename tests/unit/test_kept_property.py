"""A kept property: made when it is first read, the same for all who read it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from outbox.core.kept_property import kept_property

WITHIN = 10.0  # seconds that no thread takes


class Example:
    def __init__(self, threads: int = 1) -> None:
        self.meeting = Barrier(threads)
        self.made = 0

    @kept_property
    def value(self) -> object:
        """What is kept."""
        self.made += 1
        self.meeting.wait(WITHIN)  # no thread makes it alone
        return object()


def test_a_value_is_made_when_it_is_first_read_and_kept() -> None:
    example, other = Example(), Example()
    assert not example.made
    assert example.value is example.value
    assert example.made == 1
    assert other.value is not example.value


def test_threads_that_are_first_together_get_the_same_value_and_none_waits_for_another() -> None:
    example = Example(threads=3)
    with ThreadPoolExecutor(3) as threads:
        values = {id(value) for value in threads.map(lambda _: example.value, range(3))}
    assert values == {id(example.value)}


def test_what_was_assigned_counts_and_what_was_removed_is_made_anew() -> None:
    example = Example()
    vars(example)["value"] = given = object()
    assert example.value is given
    assert not example.made
    del vars(example)["value"]
    assert example.value is not given


def test_the_class_shows_the_property_and_its_text() -> None:
    assert isinstance(Example.value, kept_property)
    assert Example.value.__doc__ == "What is kept."
