"""Receiving: signed CloudEvents taken over HTTP, by `http_app` or by hand. Says its port and serves until it ends.

By hand it is what one would write without an inbox library: verify, parse, INSERT … ON CONFLICT DO NOTHING into one
table, COMMIT, 202. Neither handles what it stored.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from typing import Any

import uvicorn
from sqlalchemy import text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from bench.programs.posting import CONCURRENCY, SECRET
from outbox import http_app, listen, setup
from outbox.core.webhooks import Secrets, verify

ROW = text("INSERT INTO received_by_hand VALUES (:source, :id, :type, :body) ON CONFLICT DO NOTHING")


class ByHand:
    """One transaction for each request."""

    def __init__(self) -> None:
        engine = create_async_engine(os.environ["OUTBOX_DB_ENGINE_URL"], pool_size=CONCURRENCY)
        self._sessions = async_sessionmaker(engine, expire_on_commit=False)
        self._secrets = Secrets(SECRET)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        body, more = b"", True
        while more:
            part = await receive()
            body, more = body + part.get("body", b""), part.get("more_body", False)
        verify(self._secrets, headers, body, time.time())
        event = json.loads(body)
        row = {"source": event["source"], "id": event["id"], "type": event["type"], "body": json.dumps(event["data"])}
        async with self._sessions() as session, session.begin():
            await session.execute(ROW, row)
        await send({"type": "http.response.start", "status": 202, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


def ours() -> Any:
    @listen("bench.order", queue="received")
    async def order(body: dict[str, Any]) -> None: ...

    setup(observers=[])
    return http_app([order], secrets=SECRET)


async def main(which: str) -> None:
    app = ours() if which == "ours" else ByHand()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        config = uvicorn.Config(app, log_level="warning", access_log=False, ws="none", lifespan="off")
        await uvicorn.Server(config).serve([listening])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
