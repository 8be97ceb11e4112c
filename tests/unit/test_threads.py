"""Threads: where plain functions run."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait

import pytest

from outbox.inbound.threads import Threads

LONG = 30.0  # seconds after which a test is lost


@pytest.fixture
def threads() -> Iterator[Threads]:
    pool = Threads(3)
    yield pool
    pool.shutdown()


def names(pool_size: int, pool: Threads, work: Callable[[], None]) -> set[str]:
    """The threads that serve as many calls at once as the pool is large."""
    together = threading.Barrier(pool_size)

    def call() -> str:
        together.wait(LONG)
        work()
        return threading.current_thread().name

    return {future.result(LONG) for future in [pool.submit(call) for _ in range(pool_size)]}


def test_a_function_runs_in_another_thread_and_its_value_comes_back(threads: Threads) -> None:
    def work(first: int, *, second: int) -> tuple[int, bool]:
        return first + second, threading.current_thread() is threading.main_thread()

    assert threads.submit(work, 1, second=2).result(LONG) == (3, False)


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(3), StopIteration()])
def test_whatever_a_function_raises_comes_back(threads: Threads, error: BaseException) -> None:
    def work() -> None:
        raise error

    assert threads.submit(work).exception(LONG) is error
    assert threads.submit(lambda: "still there").result(LONG) == "still there"


def test_as_many_run_at_once_as_the_pool_is_large(threads: Threads) -> None:
    assert len(names(3, threads, lambda: None)) == 3


def test_no_more_run_at_once_than_the_pool_is_large(threads: Threads) -> None:
    running, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.002)
        with lock:
            running -= 1

    wait([threads.submit(work) for _ in range(60)], LONG)
    assert most <= 3
    assert running == 0


def test_a_thread_that_has_nothing_to_do_is_used_again() -> None:
    pool = Threads(100)
    seen = set()
    for _ in range(100):
        seen.add(pool.submit(lambda: threading.current_thread().name).result(LONG))
        time.sleep(0.001)  # a value comes back a moment before its thread is free
    pool.shutdown()
    assert len(seen) < 50


def test_threads_are_made_only_when_they_are_needed() -> None:
    before = threading.active_count()
    pool = Threads(1000)
    assert threading.active_count() == before
    pool.submit(lambda: None).result(LONG)
    assert threading.active_count() <= before + 1
    pool.shutdown()


def test_everything_submitted_is_run_once(threads: Threads) -> None:
    ran: list[int] = []
    futures: list[Future[None]] = [threads.submit(ran.append, number) for number in range(500)]
    wait(futures, LONG)
    assert sorted(ran) == list(range(500))


def test_many_may_submit_at_once() -> None:
    pool = Threads(4)
    done: list[Future[int]] = []

    def submit() -> None:
        for number in range(100):
            done.append(pool.submit(int, number))  # noqa: PERF401 - one by one is the point

    submitters = [threading.Thread(target=submit) for _ in range(4)]
    for submitter in submitters:
        submitter.start()
    for submitter in submitters:
        submitter.join(LONG)
    assert len(wait(done, LONG).done) == 400
    pool.shutdown()


def test_what_is_cancelled_before_it_began_does_not_run() -> None:
    pool = Threads(1)
    hold, ran = threading.Event(), threading.Event()
    first = pool.submit(hold.wait, LONG)
    second = pool.submit(ran.set)
    assert second.cancel()
    third = pool.submit(lambda: "ran")
    hold.set()
    assert (first.result(LONG), third.result(LONG)) == (True, "ran")
    assert not ran.is_set()
    pool.shutdown()


def test_shutdown_lets_work_end_and_then_the_threads() -> None:
    pool = Threads(2)
    hold = threading.Event()
    working = [pool.submit(hold.wait, LONG) for _ in range(2)]
    queued = pool.submit(lambda: threading.current_thread())
    pool.shutdown()
    hold.set()
    assert [each.result(LONG) for each in working] == [True, True]
    thread = queued.result(LONG)
    thread.join(LONG)
    assert not thread.is_alive()


def test_a_thread_that_never_ends_does_not_keep_the_process_from_ending() -> None:
    script = """
import threading
from outbox.inbound.threads import Threads
begun = threading.Event()
def work():
    begun.set()
    threading.Event().wait()
Threads(1).submit(work)
begun.wait(10)
print("end")
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=2 * LONG)
    assert (ran.stdout, ran.returncode) == ("end\n", 0), ran.stderr
