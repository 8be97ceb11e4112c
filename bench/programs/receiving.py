"""Receiving: CloudEvents taken over HTTP, by `http_app` or by hand. Says its port and serves until it ends.

By hand it is one transaction for each request: BEGIN, INSERT, COMMIT, 204, and nothing else. The careful one is what
one would write without an inbox library: verify, parse, INSERT … ON CONFLICT DO NOTHING through a session. Nobody
handles what it stored.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

import asyncpg
import uvicorn
import uvloop
from sqlalchemy import text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from bench.programs.posting import CONCURRENCY, SECRET
from outbox import http_app, listen, outbox, setup
from outbox.core.webhooks import Secrets, verify

PLAIN = "INSERT INTO received_by_hand (body) VALUES ($1)"
ONCE = text("INSERT INTO received_with_care VALUES (:source, :id, :type, :body) ON CONFLICT DO NOTHING")

TAKEN = {"type": "http.response.start", "status": 204, "headers": []}
END = {"type": "http.response.body", "body": b""}


class ByHand:
    """One transaction for each request, with whatever it holds."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = await whole(receive)
        async with self._pool.acquire() as connection, connection.transaction():
            await connection.execute(PLAIN, body)
        await send(TAKEN)
        await send(END)


class WithCare:
    """The same for signed events, each of which counts once."""

    def __init__(self) -> None:
        engine = create_async_engine(os.environ["OUTBOX_DB_ENGINE_URL"], pool_size=CONCURRENCY)
        self._sessions = async_sessionmaker(engine, expire_on_commit=False)
        self._secrets = Secrets(SECRET)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        body = await whole(receive)
        verify(self._secrets, headers, body, time.time())
        event = json.loads(body)
        row = {"source": event["source"], "id": event["id"], "type": event["type"], "body": json.dumps(event["data"])}
        async with self._sessions() as session, session.begin():
            await session.execute(ONCE, row)
        await send(TAKEN)
        await send(END)


async def whole(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        part = await receive()
        body, more = body + part.get("body", b""), part.get("more_body", False)
    return body


async def by_hand() -> Any:
    return ByHand(await asyncpg.create_pool(os.environ["BENCH_URL"], min_size=CONCURRENCY, max_size=CONCURRENCY))


async def with_care() -> Any:
    return WithCare()


async def ours() -> Any:
    @listen("bench.order", queue="received")
    async def order(body: dict[str, Any]) -> None: ...

    setup(log=False)
    await outbox.create_tables()
    return http_app([order], secrets=SECRET)


APPS = {"by-hand": by_hand, "with-care": with_care, "ours": ours}


async def main(which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        config = uvicorn.Config(await APPS[which](), log_level="warning", access_log=False, ws="none", lifespan="off")
        await uvicorn.Server(config).serve([listening])


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
