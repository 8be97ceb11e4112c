"""Posting: signed CloudEvents to a port of this machine, by bare aiohttp.

Told `port first count`, it says the seconds and the processor time that it took.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator

import aiohttp
import uvloop

from bench.programs.payload import body
from outbox import Message
from outbox.core.body import encode
from outbox.core.cloudevents import structured
from outbox.core.webhooks import Secrets, sign

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # noqa: S105 - of nobody
CONCURRENCY = 32

Posted = tuple[dict[str, str], bytes]


def requests(first: int, count: int) -> list[Posted]:
    """Made before the clock starts."""
    made, secrets = [], Secrets(SECRET)
    for number in range(first, first + count):
        encoded, content_type = encode(body(number), "bench.order")
        message = Message(routing_key="bench.order", body=encoded, content_type=content_type)
        headers, event = structured(message, "/bench")
        made.append(({**headers, **sign(secrets, message.id, int(time.time()), event)}, event))
    return made


async def post(session: aiohttp.ClientSession, url: str, left: Iterator[Posted]) -> None:
    for headers, event in left:
        async with session.post(url, headers=headers, data=event) as answer:
            if not answer.ok:
                raise RuntimeError(f"{answer.status} {await answer.text()}")


async def posted(port: int, first: int, count: int) -> tuple[float, float]:
    left = iter(requests(first, count))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONCURRENCY)) as session:
        began, processor_time = time.monotonic(), time.process_time()
        await asyncio.gather(*(post(session, f"http://127.0.0.1:{port}/", left) for _ in range(CONCURRENCY)))
        return time.monotonic() - began, time.process_time() - processor_time


if __name__ == "__main__":
    for line in sys.stdin:
        port, first, count = map(int, line.split())
        print(*uvloop.run(posted(port, first, count)), flush=True)
