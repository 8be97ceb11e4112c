"""HttpApp: an ASGI application that answers when what it was sent is stored, and works it off."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from outbox.core.errors import described
from outbox.core.events import Advised, Observer, RequestDeclined
from outbox.inbound.http.intake import Intake
from outbox.inbound.http.permission import permission
from outbox.inbound.http.response import ACCEPTED, Declined, Receive, Response, Scope, Send

_NOBODY_WORKS = (
    "nothing in this process handles what it stores: a mounted application has no lifespan of its own, so write "
    "`async with app.running():` in that of yours, or let a worker serve its queues"
)


class HttpApp:
    """Takes CloudEvents and webhooks. Its lifespan is a worker; where it has none, `running` is."""

    def __init__(
        self,
        intake: Intake,
        working: Callable[[], AbstractAsyncContextManager[None]],
        close: Callable[[], Awaitable[None]],
        observe: Observer,
    ) -> None:
        self._intake = intake
        self._working = working
        self._close = close
        self._observe = observe
        self._advised = False  # that no worker runs, unless one does

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._serve(scope, receive, send)
            case "lifespan":
                await self._live(receive, send)
            case "websocket":
                await send({"type": "websocket.close"})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Handle what was stored, in the background of this block: where no server gives the application a lifespan."""
        self._advised = True
        async with self._working():
            yield

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._response(scope, receive)
        await response.send(send)

    async def _response(self, scope: Scope, receive: Receive) -> Response:
        try:
            permitted = permission(scope)
            if permitted is not None:
                return permitted
            await self._intake.take(scope, receive)
        except Declined as declined:
            self._observe(RequestDeclined(declined.response.status, declined.response.line))
            return declined.response
        if not self._advised:
            self._advised = True
            self._observe(Advised("http_app", _NOBODY_WORKS))
        return ACCEPTED

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        step = "startup"
        try:
            try:
                async with self.running():
                    await send({"type": "lifespan.startup.complete"})
                    step = "shutdown"
                    await receive()
            finally:
                await self._close()
        except Exception as error:  # noqa: BLE001 - the server says it, and ends
            await send({"type": f"lifespan.{step}.failed", "message": described(error)})
        else:
            await send({"type": "lifespan.shutdown.complete"})
