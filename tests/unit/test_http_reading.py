"""Requests as messages: ids that tell senders apart, and paths wherever the application is mounted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.message import check, check_message_ids
from outbox.inbound.http.bodies import Bodies
from outbox.inbound.http.options import largest_request
from outbox.inbound.http.reading import inbox_id, read
from outbox.inbound.http.request import Request, head_of
from outbox.inbound.http.response import Declined

TEXTS = st.text(max_size=20)


def test_an_id_is_the_same_in_every_version() -> None:
    """An entry that was made yesterday must be found today: whoever changes this makes copies new."""
    assert inbox_id("event", "/shop", "1") == "d9e8acf12bdc448ce96034a968d1d68c3d19593f9b4d2b36e4626c53eb79e5db"
    assert inbox_id("webhook", "/", "msg_1") == "9df5a7c822042885eecbc351f9a47e7cd0a10c77939f900c549e8f06b71c3806"


@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_two_senders_never_share_an_id(source: str, id: str, other_source: str, other_id: str) -> None:
    is_same = (source, id) == (other_source, other_id)
    assert (inbox_id("event", source, id) == inbox_id("event", other_source, other_id)) is is_same
    assert inbox_id("event", source, id) != inbox_id("webhook", source, id)
    assert len(inbox_id("event", source, id).encode()) <= 255


@pytest.mark.parametrize("pair", [("ab", "c"), ("", "abc"), ("abc", ""), ('a","', "bc"), ("a\\", "bc"), ("\ud800", "")])
def test_where_a_source_ends_is_not_a_matter_of_opinion(pair: tuple[str, str]) -> None:
    assert inbox_id("event", *pair) != inbox_id("event", "a", "bc")


def bodies(within: float = 60) -> Bodies:
    return Bodies(largest=100, most_at_once=2, within=within)


async def request_to(path: str, root_path: str | None = None, **changes: Any) -> Request:
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], **changes}
    if root_path is not None:
        scope["root_path"] = root_path

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    head = head_of(scope, 100)
    return Request(head.endpoint, head.path, head.headers, await bodies().read(scope, receive))


@pytest.mark.parametrize(
    ("path", "root_path", "endpoint", "below"),
    [
        ("/", None, "/", ""),
        ("/", "", "/", ""),
        ("/order.paid", "", "/order.paid", "order.paid"),
        ("/order.paid/", "", "/order.paid", "order.paid"),
        ("//order.paid//", "", "/order.paid", "order.paid"),
        ("//", "", "/", ""),
        ("/hooks", "/hooks", "/hooks", ""),
        ("/hooks/", "/hooks", "/hooks", ""),
        ("/hooks//", "/hooks", "/hooks", ""),
        ("/", "/hooks", "/hooks", ""),
        ("/hooks/order.paid", "/hooks", "/hooks/order.paid", "order.paid"),
        ("/hooks/order.paid", "/hooks/", "/hooks/order.paid", "order.paid"),
        ("/order.paid", "/hooks", "/hooks/order.paid", "order.paid"),
        ("/hooksmith", "/hooks", "/hooks/hooksmith", "hooksmith"),
        ("/a/b", "", "/a/b", "a/b"),
        ("/api/hooks/order.paid", "/api/hooks", "/api/hooks/order.paid", "order.paid"),
        ("/hooks/order.paid", "/api/hooks", "/api/hooks/order.paid", "order.paid"),  # a proxy took /api away
        ("/hooks/", "/api//hooks", "/api/hooks", ""),
        ("/order.paid", "/api/hooks", "/api/hooks/order.paid", "order.paid"),
    ],
)
async def test_a_path_is_read_from_where_the_application_is_mounted(
    path: str, root_path: str | None, endpoint: str, below: str
) -> None:
    request = await request_to(path, root_path)
    assert (request.endpoint, request.path) == (endpoint, below)


@pytest.mark.parametrize("name", [b"ce-id", b"Webhook-Id", b"content-type", b"Content-Length"])
async def test_a_header_that_counts_is_there_once(name: bytes) -> None:
    with pytest.raises(Declined, match="twice") as declined:
        await request_to("/", headers=[(name, b"1"), (name.lower(), b"1")])
    assert declined.value.response.status == 400


@pytest.mark.parametrize(
    ("length", "status"), [("101", 413), ("9" * 5000, 413), ("", 400), ("-1", 400), ("\u0661", 400)]
)
async def test_a_length_is_believed_only_if_it_declines_the_request(length: str, status: int) -> None:
    with pytest.raises(Declined) as declined:
        await request_to("/", headers=[(b"content-length", length.encode())])
    assert declined.value.response.status == status
    assert (await request_to("/", headers=[(b"content-length", b"1")])).body == b"{}", "what came is what counts"


async def test_other_headers_may_be_repeated() -> None:
    request = await request_to("/", headers=[(b"x-forwarded-for", b"a"), (b"X-Forwarded-For", b"b")])
    assert request.headers["x-forwarded-for"] == "b"


async def test_later_versions_of_http_are_not_told_to_close_their_connection() -> None:
    async def receive() -> dict[str, Any]:
        raise TimeoutError

    for version, told in (("1.1", True), ("2", False), ("3", False)):
        scope = {"method": "POST", "path": "/", "headers": [], "http_version": version}
        with pytest.raises(Declined) as declined:
            await bodies().read(scope, receive)
        assert ("connection" in declined.value.response.headers) is told


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
EVENTS = st.dictionaries(
    st.sampled_from(
        ["specversion", "id", "source", "type", "time", "subject", "data", "data_base64", "datacontenttype"]
    )
    | st.sampled_from(
        ["outboxtrackingids", "outboxduetime", "outboxheaders", "expirytime", "dataschema", "x", "", "Ä"]
    ),
    VALUES | st.sampled_from(["1.0", "/", "a", "application/json", "text/plain", "2026-01-01T00:00:00Z", "%", "AA=="]),
)
WHOLE = EVENTS.map(lambda event: {"specversion": "1.0", "id": "1", "source": "/", "type": "t"} | event)
BODIES = st.binary(max_size=60) | (VALUES | WHOLE | st.lists(WHOLE, max_size=3)).map(
    lambda each: json.dumps(each).encode()
)
HEADERS = st.dictionaries(
    st.sampled_from(
        ["ce-specversion", "ce-id", "ce-source", "ce-type", "ce-time", "ce-x", "ce-", "webhook-id", "traceparent"]
    ),
    st.sampled_from(["1.0", "1", "/", "t", "%C3%A4", "%", "%ff", '"a\\"b"', "", "\xe4", "2026-01-01T00:00:00Z"]),
)
KINDS = st.sampled_from(
    [
        "application/cloudevents+json",
        "application/cloudevents-batch+json; charset=utf-8",
        "application/json",
        "",
        "\xe4",
    ]
)


@given(HEADERS, KINDS, BODIES, st.sampled_from(["", "order.paid", "\0", "x" * 300]))
def test_whatever_strangers_send_is_read_or_declined(headers: Any, kind: str, body: bytes, path: str) -> None:
    request = Request(f"/{path}", path, {**headers, "content-type": kind}, body)
    try:
        messages = read(request, headers.get("webhook-id"), 100).messages
    except Declined as declined:
        assert declined.response.status in (400, 413, 415)
        assert declined.response.line
    else:
        for message in messages:
            check(message, 100)
            check_message_ids(message)


def test_the_trace_of_a_webhook_goes_on_with_its_message() -> None:
    headers = {"content-type": "application/vnd.x+json; charset=utf-8", "traceparent": "00-a-b-01", "cookie": "secret"}
    [message] = read(Request("/k", "k", headers, b"{}"), "msg_1", 100).messages
    assert message.headers == {"webhook-id": "msg_1", "traceparent": "00-a-b-01"}
    assert message.content_type == headers["content-type"]


def test_the_largest_message_fits_in_a_request() -> None:
    assert largest_request(3_000) >= 3_000 * 4 / 3 + 64 * 1024
