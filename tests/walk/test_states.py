"""States: the words for where a message is, and what becomes of the words of 0.1 for one release."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from outbox import NEVER, Message, Outbox, QueueBacklog, listen
from outbox.testing import drain
from tests.support.commands import Command
from tests.support.observing import eventually

MakeOutbox = Callable[..., Outbox]


@listen("order.created", queue="billing", retry_delays=(3600,))
async def billing(order: dict[str, int]) -> None:
    if order["id"] == 3:
        raise ConnectionError("the bank is closed")


async def emit(outbox: Outbox, routing_key: str, *ids: int) -> None:
    async with outbox.transaction() as session:
        await outbox.emit_many(session, routing_key, [{"id": id} for id in ids])


@pytest.fixture
async def shop(make_outbox: MakeOutbox) -> Outbox:
    """A message in each state."""

    async def publish(message: Message) -> None: ...

    outbox = make_outbox(clean_up_after=NEVER)
    await emit(outbox, "order.created", 1)
    await drain(make_outbox(clean_up_after=NEVER, transport=publish))
    await outbox.store.maintenance.record_transport("database", switch=True)
    await emit(outbox, "order.created", 2, 3)
    await emit(outbox, "order.lost", 4)
    await drain(outbox, [billing], ahead=0)
    queued = Message(routing_key="order.created", body=b'{"id":5}')
    await outbox.store.queues.deliver([queued], {queued.id: ["billing"]})
    await emit(outbox, "order.created", 6)
    return outbox


async def ids(outbox: Outbox, state: str) -> list[int]:
    return [json.loads(found.message.body)["id"] for found in await outbox.messages(state=state)]


async def test_a_listener_handles_and_a_relay_sends(shop: Outbox) -> None:
    found = {json.loads(each.message.body)["id"]: each.state for each in await shop.messages()}
    states = {1: "sent", 2: "handled", 3: "retrying", 4: "unroutable", 5: "queued", 6: "waiting"}
    assert found == states
    for id, state in states.items():
        if state != "sent":
            assert await ids(shop, state) == [id]
    backlog = await shop.backlog()
    assert (backlog.handled, backlog.sent, backlog.queues[0].queued) == (1, 1, 1)


async def test_the_old_words_are_accepted_with_a_warning_that_names_the_callers_line(shop: Outbox) -> None:
    with pytest.warns(DeprecationWarning, match="'delivered' is called 'queued'") as warned:
        assert await ids(shop, "delivered") == [5]
    assert warned[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="'sent' includes handled messages") as warned:
        assert await ids(shop, "sent") == [1, 2]
    assert warned[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="includes handled"):
        [first] = await shop.messages(state="sent", limit=1)
        [second] = await shop.messages(state="sent", limit=1, after=first.row_id)
    assert [first.state, second.state] == ["sent", "handled"]


async def test_the_command_accepts_the_old_words_and_says_so_on_stderr(shop: Outbox, command: Command) -> None:
    for arguments in ([], ["--json"]):
        ran = await command.run("messages", "list", "--state", "delivered", *arguments)
        assert (ran.code, "'delivered' is called 'queued'" in ran.stderr) == (0, True)
    [found] = ran.document["messages"]
    assert (found["state"], found["queue"]) == ("queued", "billing")
    ran = await command.run("messages", "list", "--state", "sent", "--json")
    assert [found["state"] for found in ran.document["messages"]] == ["sent", "handled"]
    assert "'sent' includes handled messages" in ran.stderr
    ran = await command.run("messages", "list", "--state", "handled", "--json")
    assert ([found["state"] for found in ran.document["messages"]], ran.stderr) == (["handled"], "")
    shown = await command.run("messages", "show", ran.document["messages"][0]["message"]["id"])
    assert "now" in shown.stdout and "handled 2" in shown.stdout
    status = (await command.run("status", "--interval", "0")).stdout
    assert "\n  sent        1, kept by clean_up_after\n  handled     1, kept by clean_up_after\n" in status


async def test_what_a_route_took_is_sent(make_outbox: MakeOutbox) -> None:
    async def billing_service(message: Message) -> None: ...

    outbox = make_outbox(routes={"order.*": billing_service}, clean_up_after=NEVER)
    async with outbox.transaction() as session:
        message = await outbox.emit(session, "order.created", {"id": 1})
    async with outbox.running(relay=True):
        assert await eventually(lambda: outbox.messages(state="sent"))
    [found] = await outbox.find(message.id)
    assert (found.state, found.queue) == ("sent", "billing_service")


def test_the_old_name_of_a_number_gives_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="it is called queued") as warned:
        assert QueueBacklog(queue="q", queued=3).delivered == 3
    assert warned[0].filename == __file__
