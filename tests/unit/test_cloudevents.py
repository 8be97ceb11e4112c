"""CloudEvents: what we send others read as it was meant; what others send we read as the specification says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_binary_event, from_structured_event
from hypothesis import given
from hypothesis import strategies as some

from outbox import CloudEventInvalid, CloudEventUnsupported, Message, MessageError
from outbox.core.cloudevents import BATCHED, SOURCE, STRUCTURED, binary, is_cloud_event, parse, structured

WHEN = datetime(2026, 1, 31, 12, 30, 15, 123456, tzinfo=UTC)
MODES = {"structured": structured, "binary": binary}
REQUIRED = {"specversion": "1.0", "id": "1", "source": "/shop", "type": "order.created"}


def message(body: bytes = b'{"id":1}', **fields: Any) -> Message:
    defaults = {"routing_key": "order.created", "tracking_ids": ("id-1",), "created_at": WHEN}
    return Message(body=body, **{**defaults, **fields})


def sent(mode: str, each: Message, source: str = "/shop") -> Message:
    """What arrives."""
    headers, body = MODES[mode](each, source)
    [received] = parse({name.lower(): value for name, value in headers.items()}, body)
    assert received.source == received.message.headers[SOURCE]
    return received.message


def with_source(each: Message, source: str = "/shop") -> Message:
    return replace(each, headers={SOURCE: source, **each.headers})


def read_by_others(mode: str, each: Message, source: str = "/shop") -> Any:
    headers, body = MODES[mode](each, source)
    read = from_structured_event if headers["content-type"].startswith(STRUCTURED) else from_binary_event
    return read(HTTPMessage(headers=headers, body=body))


def structured_event(**members: Any) -> bytes:
    """An event as others write it."""
    return json.dumps({**REQUIRED, **members}).encode()


def read(body: bytes, kind: str = STRUCTURED) -> Message:
    [received] = parse({"content-type": kind}, body)
    return received.message


def read_binary(body: bytes = b"", **headers: str) -> Message:
    required = {f"ce-{name}": value for name, value in REQUIRED.items()}
    given_headers = {name.replace("_", "-"): value for name, value in headers.items()}
    [received] = parse({**required, **given_headers}, body)
    return received.message


MESSAGES = {
    "plain": message(),
    "key": message(key="customer 7 / Zoë"),
    "tracked": message(tracking_ids=("first", "a,b %", "ü", "id-1")),
    "traced": message(headers={"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "tracestate": "a=1,b=2"}),
    "headers": message(headers={"tenant": "acme", "X-Tenant": "Acme", "a.b_c": "1", "long" * 10: "x"}),
    "names that are taken": message(headers={"id": "x", "data": "y", "source": "z", "outboxheaders": "w", "type": ""}),
    "empty header": message(headers={"empty": ""}),
    "header with much in it": message(headers={"note": 'a "quoted" 100% €uro 😀 \x85 \uffff'}),
    "own source": message(headers={SOURCE: "https://shop.example/orders"}),
    "schema": message(headers={"ce-dataschema": "https://shop.example/order.json"}),
    "expires": message(expires_at=WHEN + timedelta(hours=1), due_at=WHEN + timedelta(minutes=1)),
    "other time zone": message(created_at=WHEN.astimezone(timezone(timedelta(hours=5, minutes=30)))),
    "whole second": message(created_at=WHEN.replace(microsecond=0)),
    "bytes": message(bytes(range(256)), content_type="application/octet-stream"),
    "nothing": message(b"", content_type="application/octet-stream"),
    "text": message("Grüße".encode(), content_type="text/plain; charset=utf-8"),
    "json with spaces": message(b' {"a" : 1.0,\n "b":1e400, "a": 2} '),
    "json null": message(b"null"),
    "json text": message('"Grüße"'.encode()),
    "json number": message(b"12345678901234567890.5"),
    "json of a kind": message(b"[1]", content_type="application/vnd.shop+json; v=2"),
    "says json, is none": message(b"{nope", content_type="application/json"),
    "says json, is empty": message(b"", content_type="application/json"),
    "says json, is NaN": message(b"NaN", content_type="application/json"),
    "says json, is not UTF-8": message(b'"\xff"', content_type="application/json"),
    "deep json": message(b"[" * 100_000 + b"]" * 100_000),
    "xml": message(b"<a/>", content_type="application/xml"),
    "an event": message(structured_event(id="another", data=1), content_type=STRUCTURED),
    "events": message(b"[" + structured_event(id="another") + b"]", content_type=f"{BATCHED.title()} ; charset=utf-8"),
    "an event in another format": message(b"<event/>", content_type="application/cloudevents+xml"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_arrives_as_it_was_sent(mode: str, name: str) -> None:
    each = MESSAGES[name]
    arrived = sent(mode, each)
    body = each.body.strip() if name == "json with spaces" and mode == "structured" else each.body
    assert arrived == replace(with_source(each), body=body)
    assert arrived.due_at == each.due_at


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name for name in MESSAGES if name != "deep json"])
def test_others_read_what_we_send(mode: str, name: str) -> None:
    each = MESSAGES[name]
    event = read_by_others(mode, each)
    assert (event.get_id(), event.get_type(), event.get_subject()) == (each.id, each.routing_key, each.key)
    assert event.get_source() == each.headers.get(SOURCE, "/shop")
    assert event.get_specversion() == "1.0"
    assert event.get_time() == each.created_at
    assert event.get_datacontenttype() == each.content_type
    assert same(event.get_data(), each.body)
    for extension in ("tenant", "traceparent", "tracestate"):
        assert event.get_extension(extension) == each.headers.get(extension)


def same(data: Any, body: bytes) -> bool:
    """Whether what others call the data is the body: bytes, a text, or a value of JSON."""
    if isinstance(data, bytes):
        return data == body
    if isinstance(data, str) and data.encode() == body:
        return True
    if isinstance(data, float) and math.isnan(data):
        return body == b"NaN"
    return data == json.loads(body) if body else data in (None, "", b"")


TEXTS = some.text(some.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=60)
HEADERS = some.dictionaries(some.from_regex(r"[A-Za-z0-9\-_.]{1,30}", fullmatch=True), TEXTS, max_size=5)


@given(
    mode=some.sampled_from(sorted(MODES)),
    body=some.binary(max_size=100),
    routing_key=TEXTS,
    key=some.none() | TEXTS,
    headers=HEADERS.filter(lambda headers: SOURCE not in headers),
    ids=some.lists(TEXTS, min_size=1, max_size=4),
    source=TEXTS,
    content_type=some.sampled_from(["application/json", "text/plain", "application/octet-stream"]),
)
def test_any_message_arrives_as_it_was_sent(mode: str, source: str, ids: list[str], **fields: Any) -> None:
    each = Message(tracking_ids=tuple(ids), created_at=WHEN, **fields)
    expected = with_source(each, source)
    arrived = sent(mode, each, source)
    if mode == "structured" and arrived.body != each.body:
        assert arrived.body == each.body.strip()  # space around JSON is nobody's
        arrived = replace(arrived, body=each.body)
    assert arrived == expected


@given(body=some.binary(max_size=200), kind=some.sampled_from([STRUCTURED, BATCHED, "text/plain", ""]))
def test_whatever_comes_is_an_event_or_an_error_that_can_be_answered(body: bytes, kind: str) -> None:
    try:
        parse({"content-type": kind}, body)
    except MessageError as error:
        assert str(error)


def test_of_ids_without_end_the_first_and_the_last_are_kept() -> None:
    event = {"specversion": "1.0", "id": "own", "source": "/shop", "type": "order.created", "data": 1}
    many = ",".join(f"id-{number}" for number in range(5000))
    [found] = parse({"content-type": STRUCTURED}, json.dumps(event | {"outboxtrackingids": many}).encode())
    assert found.message.tracking_ids == ("id-0", *(f"id-{number}" for number in range(4938, 5000)), "own")


# How it is written.


def test_the_structured_mode_is_the_specifications_json() -> None:
    headers, body = structured(message(key="7", tracking_ids=("a", "b")), "/shop")
    assert headers == {"content-type": "application/cloudevents+json; charset=utf-8"}
    assert json.loads(body) == {
        "specversion": "1.0",
        "id": "b",
        "source": "/shop",
        "type": "order.created",
        "time": "2026-01-31T12:30:15.123456Z",
        "datacontenttype": "application/json",
        "subject": "7",
        "outboxtrackingids": "a,b",
        "data": {"id": 1},
    }


def test_the_binary_mode_keeps_the_body_and_writes_headers() -> None:
    headers, body = binary(message(b"\x00", key="Zoë", content_type="image/png", headers={"tenant": "acme"}), "/shop")
    assert body == b"\x00"
    assert headers == {
        "content-type": "image/png",
        "ce-specversion": "1.0",
        "ce-id": "id-1",
        "ce-source": "/shop",
        "ce-type": "order.created",
        "ce-time": "2026-01-31T12:30:15.123456Z",
        "ce-subject": "Zo%C3%AB",
        "ce-tenant": "acme",
    }


def test_json_travels_byte_for_byte() -> None:
    body = b'{"price": 1.10, "big": 123456789012345678901234567890, "e": "\\u00e9", "twice": 1, "twice": 2}'
    assert sent("structured", message(body)).body == body


@pytest.mark.parametrize("name", ["webhook-id", "Content-Type", "Host", "ce-id", "Authorization", "a\u00e9"[:1]])
def test_a_header_of_a_message_never_becomes_a_header_of_the_request(name: str) -> None:
    headers, _ = binary(message(headers={name: "x"}), "/shop")
    assert {each.lower() for each in headers} <= {
        "content-type", "ce-specversion", "ce-id", "ce-source", "ce-type", "ce-time", "ce-outboxheaders", "ce-a",
    }  # fmt: skip
    assert headers["content-type"] == "application/json"
    assert headers["ce-id"] == "id-1"


# The HTTP binding: percent-encoding.


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("Euro € 😀", "Euro%20%E2%82%AC%20%F0%9F%98%80"),
        ("100%", "100%25"),
        ('say "hi"', "say%20%22hi%22"),
        ("a/b?c=d&e#f", "a/b?c=d&e#f"),
        ("%20", "%2520"),
        ("~!$'()*+,;:@[]{}|\\^`<>", "~!$'()*+,;:@[]{}|\\^`<>"),
        ("\u00a0", "%C2%A0"),
        ("\U0010fffd", "%F4%8F%BF%BD"),
    ],
)
def test_header_values_are_percent_encoded_as_the_binding_says(value: str, written: str) -> None:
    headers, _ = binary(message(key=value), "/shop")
    assert headers["ce-subject"] == written
    assert read_binary(ce_subject=written).key == value


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("Euro%20%e2%82%ac", "Euro €"),  # lower case
        ("%41%42", "AB"),  # more than needs to be
        ("%2541", "%41"),  # one round, not two
        ('"quoted"', "quoted"),
        ('"quo\\"ted\\\\"', 'quo"ted\\'),
        ('"a%20b"', "a b"),
        ('half"', 'half"'),
        ("a b", "a b"),
        ("a+b", "a+b"),
    ],
)
def test_header_values_are_read_as_the_binding_says(written: str, value: str) -> None:
    assert read_binary(ce_subject=written).key == value


@pytest.mark.parametrize("written", ["%", "%4", "a%zz", "%C0%A0", "%ED%A0%80", "%FF", "%E2%82"])
def test_header_values_that_are_no_utf_8_are_refused(written: str) -> None:
    with pytest.raises(CloudEventInvalid, match="ce-subject"):
        read_binary(ce_subject=written)


# What others send.


def test_an_event_with_no_more_than_it_must_have() -> None:
    found = read(structured_event())
    assert (found.id, found.routing_key, found.body, found.key) == ("1", "order.created", b"", None)
    assert found.headers == {SOURCE: "/shop"}
    assert datetime.now(UTC) - found.created_at < timedelta(minutes=1)


@pytest.mark.parametrize(
    ("members", "body", "content_type"),
    [
        ({"data": {"a": 1}}, b'{"a": 1}', "application/json"),
        ({"data": None}, b"null", "application/json"),
        ({"data": "text"}, b'"text"', "application/json"),
        ({"data": "text", "datacontenttype": "application/json"}, b'"text"', "application/json"),
        ({"data": "text", "datacontenttype": "text/plain"}, b"text", "text/plain"),
        ({"data": "<a/>", "datacontenttype": "application/xml"}, b"<a/>", "application/xml"),
        ({"data": {"a": 1}, "datacontenttype": "application/xml"}, b'{"a": 1}', "application/xml"),
        ({"data": [1], "datacontenttype": "application/geo+json"}, b"[1]", "application/geo+json"),
        ({"data_base64": "AP8="}, b"\x00\xff", "application/octet-stream"),
        ({"data_base64": "e30=", "datacontenttype": "application/json"}, b"{}", "application/json"),
        ({"data_base64": None, "data": 1}, b"1", "application/json"),
        ({"datacontenttype": "text/plain"}, b"", "text/plain"),
    ],
)
def test_data_is_read_as_its_type_says(members: dict[str, Any], body: bytes, content_type: str) -> None:
    found = read(structured_event(**members))
    assert (found.body, found.content_type) == (body, content_type)


def test_extensions_of_any_type_become_headers() -> None:
    found = read(structured_event(flag=True, off=False, number=-7, text="x", unset=None))
    assert found.headers == {SOURCE: "/shop", "flag": "true", "off": "false", "number": "-7", "text": "x"}


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-01-31T12:30:15Z", WHEN.replace(microsecond=0)),
        ("2026-01-31t12:30:15.123456z", WHEN),
        ("2026-01-31T12:30:15.123456789Z", WHEN),
        ("2026-01-31T18:00:15.123456+05:30", WHEN),
        ("2026-01-31T12:30:15.1-00:00", WHEN.replace(microsecond=100_000)),
    ],
)
def test_times_are_read_as_rfc_3339(text: str, moment: datetime) -> None:
    assert read(structured_event(time=text)).created_at == moment
    assert read_binary(ce_time=text).created_at == moment


def test_a_batch_holds_any_number_of_events() -> None:
    events = [{**REQUIRED, "id": str(number), "data": number} for number in range(3)]
    found = parse({"content-type": f"{BATCHED}; charset=utf-8"}, json.dumps(events, indent=2).encode())
    assert [(each.message.id, each.message.body, each.source) for each in found] == [
        ("0", b"0", "/shop"),
        ("1", b"1", "/shop"),
        ("2", b"2", "/shop"),
    ]
    assert parse({"content-type": BATCHED}, b" [ ] ") == []


@pytest.mark.parametrize(
    "kind",
    [STRUCTURED, STRUCTURED.upper(), f"{STRUCTURED};charset=UTF-8", f' {STRUCTURED} ; charset="utf-8"'],
)
def test_content_types_are_compared_as_http_does(kind: str) -> None:
    assert read(structured_event(), kind).id == "1"


def test_whether_a_request_is_an_event_can_be_asked_before() -> None:
    assert is_cloud_event({"content-type": STRUCTURED})
    assert is_cloud_event({"content-type": BATCHED})
    assert is_cloud_event({"content-type": "application/cloudevents+avro"})
    assert is_cloud_event({"content-type": "application/json", "ce-specversion": "1.0"})
    assert not is_cloud_event({"content-type": "application/json", "ce-id": "1"})
    assert not is_cloud_event({})


BAD = {
    "no JSON": b"{",
    "nothing": b"",
    "not UTF-8": b"\xff\xfe",
    "a byte order mark": b"\xef\xbb\xbf" + structured_event(),
    "a list": json.dumps([REQUIRED]).encode(),
    "a text": b'"event"',
    "two events": structured_event() + structured_event(),
    "something behind it": structured_event() + b" x",
    "a comma too many": structured_event()[:-1] + b",}",
    "a name that is none": b"{1: 2}",
    "a member twice": structured_event()[:-1] + b',"id":"2"}',
    "NaN": structured_event()[:-1] + b',"data":NaN}',
    "Infinity": structured_event()[:-1] + b',"data":[Infinity]}',
    "endless depth": structured_event()[:-1] + b',"data":' + b"[" * 200_000 + b"}",
    "half a surrogate pair": structured_event()[:-1] + b',"subject":"\\ud800"}',
    "no id": structured_event(id=None),
    "no source": structured_event(source=None),
    "no type": structured_event(type=None),
    "no specversion": structured_event(specversion=None),
    "empty id": structured_event(id=""),
    "empty source": structured_event(source=""),
    "empty type": structured_event(type=""),
    "specversion 0.3": structured_event(specversion="0.3"),
    "specversion 1.1": structured_event(specversion="1.1"),
    "id that is a number": structured_event(id=25),
    "id that is true": structured_event(id=True),
    "type that is a number": structured_event(type=7),
    "subject that is a number": structured_event(subject=7),
    "empty subject": structured_event(subject=""),
    "empty dataschema": structured_event(dataschema=""),
    "empty datacontenttype": structured_event(datacontenttype=""),
    "empty datacontenttype of data": structured_event(datacontenttype="", data="x"),
    "empty time": structured_event(time=""),
    "datacontenttype that is no media type": structured_event(datacontenttype="xyz"),
    "datacontenttype without a subtype": structured_event(datacontenttype="text/", data="x"),
    "datacontenttype with a space": structured_event(datacontenttype="text /plain", data_base64="AA=="),
    "id that is an object": structured_event(id={}),
    "type that is a list": structured_event(type=["x"]),
    "extension that is an object": structured_event(extension={"a": 1}),
    "extension that is a list": structured_event(extension=[1]),
    "extension that is a fraction": structured_event(extension=1.5),
    "extension with a capital": structured_event(Extension="x"),
    "extension with a hyphen": structured_event(**{"my-extension": "x"}),
    "extension without a name": structured_event(**{"": "x"}),
    "both kinds of data": structured_event(data=1, data_base64="AA=="),
    "base64 that is none": structured_event(data_base64="?"),
    "base64 that is an object": structured_event(data_base64={}),
    "time without a zone": structured_event(time="2026-01-31T12:30:15"),
    "time without a time": structured_event(time="2026-01-31"),
    "time with a space": structured_event(time="2026-01-31 12:30:15Z"),
    "time that does not exist": structured_event(time="2026-02-30T12:30:15Z"),
    "time that is the last one": structured_event(time="9999-12-31T23:59:59Z"),
    "time that is the first one": structured_event(time="0001-01-01T00:00:00Z"),
    "expiry in the year 9999": structured_event(expirytime="9999-01-01T00:00:00Z"),
    "time before all times": structured_event(time="0001-01-01T00:00:00+14:00"),
    "time as a number": structured_event(time=1700000000),
    "time in other digits": structured_event(time="٢٠٢٦-01-31T12:30:15Z"),
    "expiry that is no time": structured_event(expirytime="tomorrow"),
    "due time that is no time": structured_event(outboxduetime="soon"),
    "headers that are no JSON": structured_event(outboxheaders="{"),
    "headers that are no object": structured_event(outboxheaders="[]"),
    "headers that are no texts": structured_event(outboxheaders='{"a":1}'),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_event_is_refused(case: str) -> None:
    with pytest.raises(CloudEventInvalid):
        read(BAD[case])


@pytest.mark.parametrize("body", [b"{}", b"[1]", b"[{}]", b"[", b"[" + structured_event() + b",]", b"[,]"])
def test_what_is_no_batch_is_refused_as_a_whole(body: bytes) -> None:
    with pytest.raises(CloudEventInvalid):
        parse({"content-type": BATCHED}, body)


@pytest.mark.parametrize("name", ["ce-id", "ce-source", "ce-type", "ce-specversion"])
def test_a_binary_event_without_a_required_attribute_is_refused(name: str) -> None:
    headers = {f"ce-{each}": value for each, value in REQUIRED.items()}
    for broken in ({**headers, name: ""}, {each: value for each, value in headers.items() if each != name}):
        with pytest.raises(CloudEventInvalid):
            parse(broken, b"")


@pytest.mark.parametrize(
    ("header", "value"), [("ce-subject", ""), ("ce-dataschema", ""), ("ce-time", ""), ("content-type", "xyz")]
)
def test_a_binary_event_with_an_attribute_that_says_nothing_is_refused(header: str, value: str) -> None:
    with pytest.raises(CloudEventInvalid, match=header.removeprefix("ce-").replace("-", " ")):
        parse({**{f"ce-{each}": value for each, value in REQUIRED.items()}, header: value}, b"")


@pytest.mark.parametrize("header", ["ce-datacontenttype", "ce-data", "ce-my-extension", "ce-", "ce-ext_1"])
def test_a_header_that_the_binding_does_not_know_is_refused(header: str) -> None:
    headers = {f"ce-{each}": value for each, value in REQUIRED.items()}
    with pytest.raises(CloudEventInvalid):
        parse({**headers, header: "x"}, b"")


@pytest.mark.parametrize(
    "kind",
    ["application/cloudevents+xml", "application/cloudevents", "application/cloudevents-batch+avro",
     f"{STRUCTURED}; charset=latin-1"],
)  # fmt: skip
def test_formats_that_are_not_read_are_told_apart(kind: str) -> None:
    with pytest.raises(CloudEventUnsupported):
        read(structured_event(), kind)


def test_an_ordinary_request_is_no_event() -> None:
    with pytest.raises(CloudEventInvalid, match="no CloudEvent"):
        parse({"content-type": "application/json"}, b"{}")


def test_a_header_cannot_pass_for_the_source() -> None:
    found = read(structured_event(outboxheaders=json.dumps({SOURCE: "/somebody/else", "x-a": "b"})))
    assert found.headers == {SOURCE: "/shop", "x-a": "b"}
