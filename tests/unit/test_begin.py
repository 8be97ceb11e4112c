"""Begin: the first step of a coroutine is made before the caller goes on, the others by a task."""

import asyncio

import pytest

from outbox.stores.postgresql.connection import begin


async def test_the_first_step_is_made_at_once_and_the_rest_by_the_task() -> None:
    steps: list[str] = []
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        steps.append("begun")
        steps.append(await answer)
        await asyncio.sleep(0)
        steps.append("over")

    task = begin(work())
    assert steps == ["begun"]
    answer.set_result("answered")
    await task
    assert steps == ["begun", "answered", "over"]


async def test_work_that_never_waits_is_over_at_once() -> None:
    steps: list[str] = []

    async def work() -> None:
        steps.append("over")

    task = begin(work())
    assert steps == ["over"]
    await task


async def test_a_failure_after_the_first_step_is_the_tasks() -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        raise LookupError

    with pytest.raises(LookupError):
        await begin(work())


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_a_cancellation_reaches_the_coroutine_that_can_still_clean_up(turns: int) -> None:
    steps: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            steps.append("cleaned up")
            raise

    task = begin(work())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert steps == ["cleaned up"]
