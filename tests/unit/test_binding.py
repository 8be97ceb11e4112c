"""Bindings: which routing keys a binding key stands for."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox import Binding, ConfigurationError
from outbox.core.binding import Bindings, first_match, matches

WORDS = st.lists(st.sampled_from(["a", "b", "ab", "", "ä"]), min_size=1, max_size=7).map(".".join)
PATTERNS = st.lists(st.sampled_from(["a", "b", "ab", "", "*", "#", "#"]), min_size=1, max_size=6).map(".".join)


def obviously_right(pattern: list[str], words: list[str]) -> bool:
    """The rules as one would say them; takes exponential time, which short keys can afford."""
    if not pattern:
        return not words
    wanted, *rest = pattern
    if wanted == "#":
        return any(obviously_right(rest, words[taken:]) for taken in range(len(words) + 1))
    return bool(words) and wanted in ("*", words[0]) and obviously_right(rest, words[1:])


@given(PATTERNS, WORDS)
def test_matching_agrees_with_the_rules_as_one_would_say_them(pattern: str, routing_key: str) -> None:
    assert matches(pattern, routing_key) == obviously_right(pattern.split("."), routing_key.split("."))


@given(WORDS)
def test_a_key_without_wildcards_matches_itself_and_a_hash_matches_everything(routing_key: str) -> None:
    assert matches(routing_key, routing_key)
    assert matches("#", routing_key)


@given(PATTERNS, WORDS)
def test_a_hash_at_either_end_takes_nothing_away(pattern: str, routing_key: str) -> None:
    if matches(pattern, routing_key):
        assert matches(f"#.{pattern}", routing_key)
        assert matches(f"{pattern}.#", routing_key)


ANIMALS = Bindings([Binding("Q1", "*.orange.*"), Binding("Q2", "*.*.rabbit"), Binding("Q2", "lazy.#")])


@pytest.mark.parametrize(
    ("routing_key", "queues"),
    [
        ("quick.orange.rabbit", ("Q1", "Q2")),
        ("lazy.orange.elephant", ("Q1", "Q2")),
        ("quick.orange.fox", ("Q1",)),
        ("lazy.brown.fox", ("Q2",)),
        ("lazy.pink.rabbit", ("Q2",)),  # two bindings match, the message comes once
        ("quick.brown.fox", ()),
        ("orange", ()),
        ("quick.orange.new.rabbit", ()),
        ("lazy.orange.new.rabbit", ("Q2",)),
        ("lazy", ("Q2",)),
    ],
)
def test_the_animals_of_the_rabbitmq_tutorial_reach_the_queues_it_says(
    routing_key: str, queues: tuple[str, ...]
) -> None:
    assert ANIMALS.queues(routing_key) == queues


@pytest.mark.parametrize(
    ("binding_key", "matching", "other"),
    [
        ("*.stock.#", "usd.stock", "stock.nasdaq"),  # the example of the AMQP specification
        ("*.stock.#", "eur.stock.db", "stock"),
        ("a.#.b", "a.b", "a.b.c"),
        ("a.#.b", "a.x.y.b", "x.a.b"),
        ("a.#.b", "a.b.b", "b"),
        ("#.b", "b", "b.c"),
        ("#.b.#", "a.b.c", "a.c"),
        ("a.*", "a.b", "a"),
        ("a.*", "a.", "a.b.c"),
        ("*", "a", "a.b"),
        ("*.#", "a", None),
        ("#.*", "a.b.c", None),
        ("#.#", "a", None),
        ("#.*.#.*", "a.b", "a"),
        ("#.a.#.a.#", "x.a.y.a", "x.a.y"),
        ("a.b", "a.b", "a.B"),
        ("a.*b", "a.*b", "a.bb"),  # a star is a wildcard only if it is the whole word
        ("a.b#", "a.b#", "a.b"),
        ("über.*", "über.größe", "uber.größe"),
    ],
)
def test_stars_and_hashes_mean_words(binding_key: str, matching: str, other: str | None) -> None:
    assert matches(binding_key, matching)
    assert other is None or not matches(binding_key, other)


@pytest.mark.parametrize("routing_key", ["order.*", "order.#", "*", "#"])
def test_a_wildcard_in_a_routing_key_is_a_word_like_any_other(routing_key: str) -> None:
    assert matches(routing_key.replace("*", "created").replace("#", "created"), routing_key) is False
    assert matches("#", routing_key)
    assert matches("order.*", routing_key) == routing_key.startswith("order.")


@pytest.mark.parametrize(
    ("binding_key", "routing_key"),
    [
        (".".join("#" * 128), ".".join("a" * 128)),
        (".".join("#*" * 64), ".".join("a" * 128)),
        (".".join("#a" * 63) + ".b", ".".join("a" * 128)),
        ("#." * 100 + "b", "a." * 127 + "a"),
        ("*." * 127 + "*", "a." * 127),
    ],
)
def test_no_pattern_takes_long(binding_key: str, routing_key: str) -> None:
    began = time.process_time()
    for _ in range(10):
        matches(binding_key, routing_key)
    assert time.process_time() - began < 2  # trying the ways in turn would take longer than the universe has been here


def test_the_first_rule_that_matches_decides() -> None:
    rules = {"audit.login": "keep", "audit.#": "discard"}
    assert first_match(rules, "audit.login") == "keep"
    assert first_match(rules, "audit.logout") == "discard"
    assert first_match(rules, "order.created") is None


def test_routing_keys_without_end_do_not_fill_the_memory() -> None:
    bindings = Bindings([Binding("orders", "order.*.paid"), Binding("all", "#")])
    for number in range(25_000):
        assert bindings.queues(f"order.{number}.paid") == ("all", "orders")
    assert len(bindings._cache) <= 10_000
    assert bindings.queues("order.paid") == ("all",)


@pytest.mark.parametrize("name", ["a" * 255, "é" * 127, "order created", "日本", "🎉", "a..b", "."])
def test_a_printable_name_of_at_most_255_bytes_is_taken(name: str) -> None:
    assert Binding(name, name).queue == name


@pytest.mark.parametrize(
    "name",
    ["", None, 5, b"order", ["order"], "a" * 256, "é" * 128, "a\n", "a\r", "a\x00", "\t", "\x7f", "\x1b[31m", "\ud800"],
)
def test_a_name_that_could_not_be_stored_or_sent_is_refused(name: object) -> None:
    with pytest.raises(ConfigurationError, match="queue"):
        Binding(name, "order.created")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="binding key"):
        Binding("orders", name)  # type: ignore[arg-type]
