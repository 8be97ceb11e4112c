"""http_app() inside of applications of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from django.core.handlers.asgi import ASGIHandler
from django.http import HttpRequest, HttpResponse
from django.test.utils import override_settings
from django.urls import path
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from outbox import Listener, Message, Outbox
from tests.support.databases import on_sqlite
from tests.support.observing import arrival
from tests.support.sending import head, serving, structured, webhook

from . import driving  # noqa: F401 - sets Django up

pytestmark = on_sqlite

Arrivals = asyncio.Queue[tuple[Any, Message]]


async def check(app: Any, arrivals: Arrivals) -> None:
    """Events and webhooks are taken below /hooks, and the rest of the application is what it was."""
    async with serving(app) as sender:
        assert (await sender.post(*structured(1), path="/hooks/")).is_taken
        assert (await arrival(arrivals))[0] == 1
        assert (await sender.post(*webhook(b"[2]"), path="/hooks/order.paid")).is_taken
        body, message = await arrival(arrivals)
        assert (body, message.routing_key) == ([2], "order.paid")
        assert (await sender.post(*webhook(b'{"type": "order.sent"}'), path="/hooks/")).is_taken
        assert (await arrival(arrivals))[1].routing_key == "order.sent"
        assert (await sender.raw(head({}, "/", "GET"))).line == "the shop"
    assert arrivals.empty()


async def front(request: Request) -> PlainTextResponse:
    return PlainTextResponse("the shop")


async def test_it_is_mounted_in_starlette(outbox: Outbox, listener: Listener, arrivals: Arrivals) -> None:
    hooks = outbox.http_app([listener], secrets=None)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with hooks.running():
            yield

    routes = [Route("/", front), Mount("/hooks", hooks)]
    await check(Starlette(routes=routes, lifespan=lifespan), arrivals)


async def test_it_is_mounted_in_fastapi(outbox: Outbox, listener: Listener, arrivals: Arrivals) -> None:
    hooks = outbox.http_app([listener], secrets=None)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with hooks.running():
            yield

    app = FastAPI(lifespan=lifespan)
    app.add_route("/", front)
    app.mount("/hooks", hooks)
    await check(app, arrivals)


async def test_a_sender_that_leaves_in_the_middle_is_no_fault_to_a_middleware(
    outbox: Outbox, listener: Listener, arrivals: Arrivals
) -> None:
    hooks = outbox.http_app([listener], secrets=None)
    answered: asyncio.Queue[int | Exception] = asyncio.Queue()

    async def watch(request: Request, call_next: Any) -> Any:
        try:
            answer = await call_next(request)
        except Exception as error:
            answered.put_nowait(error)
            raise
        answered.put_nowait(answer.status_code)
        return answer

    app = Starlette(routes=[Mount("/hooks", hooks)], middleware=[Middleware(BaseHTTPMiddleware, dispatch=watch)])
    headers, body = structured()
    async with serving(app) as sender:
        async with sender.connection() as (_, writer):
            writer.write(head(headers, "/hooks/", length=len(body) + 1) + body)  # one byte more than there is
            await writer.drain()
        assert await arrival(answered) == 400
    assert await outbox.messages() == []
    assert arrivals.empty()


async def test_it_is_mounted_behind_a_proxy_that_takes_a_part_of_the_path_away(
    outbox: Outbox, listener: Listener, arrivals: Arrivals
) -> None:
    hooks = outbox.http_app([listener], secrets=None)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with hooks.running():
            yield

    app = Starlette(routes=[Route("/", front), Mount("/hooks", hooks)], lifespan=lifespan)

    async def told_of_the_proxy(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "root_path": "/api"}, receive, send)

    await check(told_of_the_proxy, arrivals)


async def view(request: HttpRequest) -> HttpResponse:
    return HttpResponse("the shop", headers={"content-length": "8"})


urlpatterns = [path("", view)]


@override_settings(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["localhost"])  # type: ignore[untyped-decorator]
async def test_it_stands_beside_django(outbox: Outbox, listener: Listener, arrivals: Arrivals) -> None:
    django = ASGIHandler()
    hooks = outbox.http_app([listener], secrets=None)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await hooks(scope, receive, send)
        elif scope["path"].startswith("/hooks/"):
            await hooks({**scope, "root_path": "/hooks"}, receive, send)
        else:
            await django(scope, receive, send)

    await check(application, arrivals)
