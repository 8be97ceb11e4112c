"""Tracking: the ids that lead from an entry point to the message at hand."""

import asyncio
import threading
import time
from contextlib import ExitStack
from contextvars import copy_context
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox import Message, Outbox, get_tracking_ids, tracking
from outbox.core import cloudevents
from outbox.core.errors import MessageIdInvalid
from outbox.core.message import check_message_ids, follow, new_id


def test_outside_of_everything_there_are_no_tracking_ids() -> None:
    assert get_tracking_ids() == ()


def test_a_block_has_one_id_that_everything_in_it_shares() -> None:
    with tracking() as ids:
        assert len(ids) == 1
        assert get_tracking_ids() == ids
        first = Message(routing_key="a", body=b"")
        second = Message(routing_key="b", body=b"")
    assert first.tracking_ids[:-1] == second.tracking_ids[:-1] == ids
    assert first.id != second.id
    assert get_tracking_ids() == ()


def test_a_block_inside_a_block_adds_an_id() -> None:
    with tracking() as outer:
        with tracking() as inner:
            assert inner[:-1] == outer
            assert len(inner) == 2
        assert get_tracking_ids() == outer


def test_an_outbox_has_the_same_block_and_the_same_ids() -> None:
    first, second = Outbox(), Outbox()
    with first.tracking() as ids:
        assert first.get_tracking_ids() == second.get_tracking_ids() == get_tracking_ids() == ids
        with second.tracking() as more:
            assert get_tracking_ids() == more
            assert more[:-1] == ids
    assert first.get_tracking_ids() == ()


def test_a_message_is_identified_by_its_last_tracking_id() -> None:
    message = Message(routing_key="a", body=b"", tracking_ids=("entry", "cause", "this"))
    assert message.id == "this"


async def test_what_follows_from_a_message_carries_its_ids_and_the_next_task_does_not() -> None:
    cause = Message(routing_key="a", body=b"")

    async def listener() -> Message:
        follow(cause.tracking_ids)
        await asyncio.sleep(0)
        return Message(routing_key="b", body=b"")

    effect = await asyncio.create_task(listener())
    assert effect.tracking_ids == (*cause.tracking_ids, effect.id)
    assert get_tracking_ids() == ()


def test_a_walk_without_end_keeps_its_first_id_and_the_last_63() -> None:
    def ticks(count: int) -> list[Message]:
        made = [Message(routing_key="tick", body=b"")]
        while len(made) < count:
            follow(made[-1].tracking_ids)
            made.append(Message(routing_key="tick", body=b""))
        return made

    walk = copy_context().run(ticks, 200)
    ids = [tick.id for tick in walk]
    assert walk[63].tracking_ids == tuple(ids[:64])
    assert walk[64].tracking_ids == (ids[0], *ids[2:65])
    assert walk[-1].tracking_ids == (ids[0], *ids[-63:])


def test_of_what_others_send_no_more_is_followed() -> None:
    strangers = tuple(f"id-{number}" for number in range(10_000))

    def following() -> tuple[tuple[str, ...], Message]:
        follow(strangers)
        return get_tracking_ids(), Message(routing_key="a", body=b"")

    led_here, message = copy_context().run(following)
    assert led_here == (strangers[0], *strangers[-63:])
    assert message.tracking_ids == (strangers[0], *strangers[-62:], message.id)


@given(
    st.text() | st.text(st.characters(max_codepoint=0x80), max_size=300) | st.sampled_from(["\ud800", "é" * 128, "é\n"])
)
def test_an_id_is_followed_if_a_message_may_have_it(id: str) -> None:
    def following() -> tuple[str, ...]:
        follow((id, "good"))
        return get_tracking_ids()

    try:
        check_message_ids(Message(routing_key="a", body=b"", tracking_ids=(id,)))
        led_here: tuple[str, ...] = (id, "good")
    except MessageIdInvalid:
        led_here = ("good",)
    assert copy_context().run(following) == led_here


@pytest.mark.parametrize("id", ["i" * 255, "%" * 255, "é" * 125, "ab"])
def test_what_is_followed_fits_into_a_header(id: str) -> None:
    """HTTP servers refuse headers of more than 8 KiB, all headers of a request together at times."""
    ids = tuple(f"{number}{id}"[: 128 if "é" in id else 255] for number in range(64))

    def what_follows() -> tuple[str, ...]:
        follow(ids)
        with tracking() as found:
            return found

    found = copy_context().run(what_follows)
    message = Message(routing_key="a", body=b"1", tracking_ids=found)
    headers, _ = cloudevents.binary(message, "/shop")
    assert max(map(len, headers.values())) < 4096 + 40
    assert (found[0], found[-2]) == (ids[0], ids[-1])
    assert found[1:-1] == ids[len(ids) - len(found) + 2 :], "the last ones, without a gap"
    assert len(found) == (64 if id == "ab" else len(found))


def test_blocks_inside_blocks_keep_no_more_either() -> None:
    with ExitStack() as stack:
        [first, *_] = [stack.enter_context(tracking()) for _ in range(100)]
        assert len(get_tracking_ids()) == 64
        assert get_tracking_ids()[:1] == first


def test_an_exception_ends_the_block_like_any_other_end() -> None:
    with pytest.raises(KeyError), tracking():
        raise KeyError("x")
    assert get_tracking_ids() == ()


async def test_tasks_side_by_side_do_not_see_each_others_ids() -> None:
    both = asyncio.Barrier(2)

    async def entry_point() -> tuple[str, ...]:
        with tracking() as ids:
            await both.wait()  # both blocks are open now
            assert get_tracking_ids() == ids
            await both.wait()
            return ids

    first, second = await asyncio.gather(entry_point(), entry_point())
    assert first != second
    assert get_tracking_ids() == ()


async def test_a_task_started_in_a_block_inherits_its_ids() -> None:
    async def ids() -> tuple[str, ...]:
        return get_tracking_ids()

    with tracking() as here:
        task = asyncio.create_task(ids())
    assert await task == here


def test_a_thread_has_the_ids_of_the_context_it_is_given_and_no_others() -> None:
    seen: list[tuple[str, ...]] = []
    with tracking() as here:
        threads = [
            threading.Thread(target=lambda: seen.append(get_tracking_ids())),
            threading.Thread(target=copy_context().run, args=(lambda: seen.append(get_tracking_ids()),)),
        ]
        for thread in threads:
            thread.start()
            thread.join()
    assert seen == [(), here]


def test_ids_are_random_uuids_in_the_order_of_time() -> None:
    before = time.time_ns() // 1_000_000
    ids = [UUID(new_id()) for _ in range(2000)]
    after = time.time_ns() // 1_000_000
    assert len(set(ids)) == len(ids)
    assert {(each.version, each.variant) for each in ids} == {(7, "specified in RFC 4122")}
    moments = [each.int >> 80 for each in ids]
    assert moments == sorted(moments)
    assert before <= moments[0] <= moments[-1] <= after


def test_the_random_part_of_an_id_uses_all_its_bits() -> None:
    ones = zeros = 0
    for _ in range(200):
        value = UUID(new_id()).int
        ones |= value
        zeros |= ~value
    random_bits = (0xFFF << 64) | 0x3FFF_FFFF_FFFF_FFFF
    assert ones & random_bits == random_bits
    assert zeros & random_bits == random_bits
