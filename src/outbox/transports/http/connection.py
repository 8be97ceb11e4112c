"""Connection: one that is kept is used again only if its server said nothing in the meantime."""

from __future__ import annotations

import aiohttp
from aiohttp.connector import Connection


class CarefulRequest(aiohttp.ClientRequest):
    """Asks over a connection on which everything was said that had been asked for.

    What a server says unasked, a second answer or that it was idle for too long, the client would take for the answer
    to its next request.
    """

    async def send(self, conn: Connection) -> aiohttp.ClientResponse:
        if conn.protocol is None or conn.protocol.should_close:
            raise aiohttp.ServerDisconnectedError("the connection was closed, or the server spoke unasked")
        return await super().send(conn)
