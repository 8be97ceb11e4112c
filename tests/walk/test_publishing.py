"""One round of a publisher, without the relay that would try again at once: nothing is sent that was not confirmed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from outbox import Message, Outbox, RetryPolicy, TransportUnavailable
from outbox.core.transport import Published
from outbox.outbound import publishing
from outbox.outbound.publishing import Publisher
from tests.support.outboxes import emit
from tests.walk.destinations import Scripted, cancelled, nothing


async def silent(messages: Sequence[Message]) -> Published:
    await asyncio.sleep(3600)
    raise AssertionError


@pytest.mark.parametrize("doubt", [nothing, cancelled, silent])
async def test_what_was_not_confirmed_is_not_sent(outbox: Outbox, doubt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "DEADLINE", 0.1)
    publisher = Publisher(
        outbox.store.feed,
        Scripted(doubt),
        batch_size=10,
        lease=timedelta(minutes=1),
        retry_policy=RetryPolicy.sequence(()),
        observe=lambda event: None,
    )
    await emit(outbox, 1, 2)
    with pytest.raises(TransportUnavailable):
        await publisher.round()
    stored = await outbox.messages()
    assert [each.message.body for each in stored] == [b"1", b"2"]
    assert {(each.state, each.attempt_count, each.crash_count, each.leased_until) for each in stored} == {
        ("waiting", 0, 0, None)
    }
