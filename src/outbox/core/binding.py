"""Binding: which routing keys a queue asks for, by the rules of a topic exchange.

A key is a list of words with dots between them. In a binding key `*` stands for exactly one word and `#` for any number
of words, none included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from outbox.core.errors import ConfigurationError

LONGEST_KEY = 255  # bytes, as brokers have it


@dataclass(frozen=True, slots=True)
class Binding:
    """A queue's wish for the messages whose routing key matches."""

    queue: str
    binding_key: str

    def __post_init__(self) -> None:
        check_name(self.queue, "queue")
        check_name(self.binding_key, "binding key")


class Bindings:
    """All bindings of an outbox, asked which queues a routing key goes to."""

    def __init__(self, bindings: Iterable[Binding]) -> None:
        self._bindings = tuple(bindings)
        self._cache: dict[str, tuple[str, ...]] = {}

    @property
    def known(self) -> Mapping[str, tuple[str, ...]]:
        """What was asked before, and the answers."""
        return self._cache

    def queues(self, routing_key: str) -> tuple[str, ...]:
        """The queues that get this message, each once, in the order of their names."""
        queues = self._cache.get(routing_key)
        if queues is None:
            found = {b.queue for b in self._bindings if matches(b.binding_key, routing_key)}
            if len(self._cache) >= 10_000:  # routing keys may hold ids: a cache of them must end somewhere
                self._cache.clear()
            queues = self._cache[routing_key] = tuple(sorted(found))
        return queues


def matches(binding_key: str, routing_key: str) -> bool:
    """Whether a routing key is one of those that a binding key stands for."""
    if "*" not in binding_key and "#" not in binding_key:
        return binding_key == routing_key
    pattern = _words(binding_key)
    # reachable[i]: the first i words of the pattern can stand for all the words read so far. One pass over the words,
    # so no pattern takes more than len(pattern) * len(words) steps.
    reachable = _skip_hashes(pattern, [True] + [False] * len(pattern))
    for word in routing_key.split("."):
        after = [False] * (len(pattern) + 1)
        for position, wanted in enumerate(pattern):
            if wanted == "#":
                after[position + 1] = reachable[position + 1]
            elif reachable[position] and wanted in ("*", word):
                after[position + 1] = True
        reachable = _skip_hashes(pattern, after)
    return reachable[-1]


def first_match(rules: Mapping[str, str], routing_key: str) -> str | None:
    """The value of the first binding key in `rules` that matches."""
    return next((value for pattern, value in rules.items() if matches(pattern, routing_key)), None)


def check_name(name: str, what: str) -> None:
    """Refuse a queue name or binding key that could not be stored or sent."""
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"a {what} must be a non-empty string, not {name!r}")
    if len(name.encode(errors="surrogatepass")) > LONGEST_KEY:
        raise ConfigurationError(f"a {what} has at most {LONGEST_KEY} bytes: {name[:40]!r}… has more")
    if not name.isprintable():
        raise ConfigurationError(f"a {what} has printable characters only: {name!r}")


def check_binding_key(key: str, what: str = "binding key") -> None:
    """Refuse a binding key that matches no routing key, or not those that it seems to."""
    check_name(key, what)
    words = key.split(".")
    if "" in words:
        raise ConfigurationError(f"the {what} {key!r} has an empty word: write one dot between words, none at an end")
    for word in words:
        if word not in ("*", "#") and ("*" in word or "#" in word):
            raise ConfigurationError(
                f"the {what} {key!r} would not match what it seems to: * stands for one whole word and # for any "
                f"number of them, so {word!r} is an ordinary word; put a dot between"
            )


@lru_cache(maxsize=4096)
def _words(binding_key: str) -> tuple[str, ...]:
    return tuple(binding_key.split("."))


def _skip_hashes(pattern: tuple[str, ...], reachable: list[bool]) -> list[bool]:
    for position, wanted in enumerate(pattern):
        if wanted == "#" and reachable[position]:
            reachable[position + 1] = True
    return reachable
