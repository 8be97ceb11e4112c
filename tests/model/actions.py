"""Actions: what anybody may do to a store next, drawn with everything it needs."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from hypothesis import strategies as st

from outbox.core.attempt import Dead, Done, Reason, Released, RetryIn
from outbox.core.store import Suspected

from .operations import ROUTING_KEYS, TIMERS
from .world import HOUR

some = st.integers(0, 7)  # which of those there are
suspension = st.sampled_from((0, 0, 0, 0, 0, 1, 2, 3))  # where an operation is cut; 0: nowhere
limits = st.sampled_from((1, 2, 3, 10))
wanted = st.dictionaries(st.sampled_from(("a", "b", "c")), limits, max_size=2)  # how many of which queue
outcomes = st.one_of(
    st.sampled_from((RetryIn(timedelta(0), "at once"), RetryIn(HOUR, "in an hour"))),
    st.sampled_from([Dead(reason, f"because {reason}") for reason in Reason]),
    st.sampled_from((Done(), Released(), Released(HOUR))),
)

ACTIONS: Mapping[str, Mapping[str, Any]] = {
    "write": {
        "what": st.sampled_from(("begin", "emit", "emit", "go on", "end", "at once", "at once")),
        "which": some,
        "routing_key": st.sampled_from(ROUTING_KEYS),
        "count": st.integers(1, 3),
        "flags": st.tuples(st.booleans(), st.booleans(), st.booleans()),
        "timer": st.sampled_from((None, *TIMERS)),
        "doing": st.sampled_from(("cancel", "save", "keep", "undo")),
    },
    "move": {
        "what": st.sampled_from(("bind", "unbind", "deliver", "route", "route", "route")),
        "which": some,
        "limit": limits,
        "discards": st.booleans(),
        "wanted": wanted,
        "cut": suspension,
    },
    "claim": {"which": some, "limit": limits, "suspected": st.sampled_from(Suspected), "cut": suspension},
    "work": {
        "what": st.sampled_from(
            ("settle", "settle", "settle", "again", "complete", "renew", "leave", "crash", "overtake", "overtake")
        ),
        "which": some,
        "attempt": some,
        "how": st.lists(outcomes, min_size=1, max_size=3),
        "commit": st.booleans(),
        "cut": suspension,
    },
    "pass_time": {"which": some, "again": some},
    "tend": {
        "what": st.sampled_from(("replay", "replay", "discard", "expire", "purge", "remember")),
        "which": some,
        "limit": limits,
        "commit": st.booleans(),
        "cut": suspension,
    },
}
OFTEN = ("claim", "work", "work", "pass_time", "write")
actions = st.one_of(
    *(st.fixed_dictionaries({"do": st.just(name), **ACTIONS[name]}) for name in sorted([*ACTIONS, *OFTEN]))
)
