"""Bodies: values to bytes when they are emitted, bytes to values when a listener asks for them."""

import inspect
import json
import math
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum, StrEnum
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.ext.asyncio import AsyncEngine
from typing_extensions import TypedDict

from outbox import BodyNotJson, ConfigurationError, OutboxError
from outbox.core.body import decoder, encode
from outbox.core.errors import Undecodable
from outbox.core.message import BYTES, JSON

NO_ANNOTATION = inspect.Parameter.empty

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)


class Colour(StrEnum):
    RED = "red"


class Size(Enum):
    SMALL = 1


class Item(BaseModel):
    name: str
    price: Decimal = Decimal("1.50")


@dataclass
class Order:
    id: int
    items: list[Item]


class Line(TypedDict):
    id: int


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]


class Reading(BaseModel):
    value: float


class LooseReading(BaseModel):
    value: Any


class ConstantsReading(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="constants")
    value: float


class WordsReading(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="strings")
    value: float


class Wrapped(BaseModel):
    reading: ConstantsReading


class Unfinished(BaseModel):
    part: "NowhereDefined"  # type: ignore[name-defined]  # noqa: F821 - that is the point


@given(JSON_VALUES)
def test_a_json_value_arrives_as_it_was_emitted(value: object) -> None:
    body, content_type = encode(value, "order.created")
    assert content_type == JSON
    assert decoder(NO_ANNOTATION)(body) == value


@given(JSON_VALUES)
def test_a_body_is_strict_json_in_utf8(value: object) -> None:
    body, _ = encode(value, "order.created")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(body.decode("utf-8"), parse_constant=refuse) == value


@given(st.binary())
def test_bytes_arrive_as_they_were_emitted(value: bytes) -> None:
    assert encode(value, "order.created") == (value, BYTES)
    assert decoder(bytes)(value) == value


@pytest.mark.parametrize("value", [bytearray(b"\x00\xff"), memoryview(b"\x00\xff"), memoryview(b"\x00-\xff-")[::2]])
def test_everything_that_is_bytes_travels_as_bytes(value: object) -> None:
    assert encode(value, "order.created") == (b"\x00\xff", BYTES)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, b"null"),
        ("grün", '"grün"'.encode()),
        ([1, 2], b"[1,2]"),
        ((1, 2), b"[1,2]"),
        ({"a": 1, "b": 2}, b'{"a":1,"b":2}'),
        ({1: "a"}, b'{"1":"a"}'),
        (Item(name="pen"), b'{"name":"pen","price":"1.50"}'),
        (Order(1, [Item(name="pen")]), b'{"id":1,"items":[{"name":"pen","price":"1.50"}]}'),
        ([Item(name="pen")], b'[{"name":"pen","price":"1.50"}]'),
        (datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC), b'"2030-01-02T03:04:05Z"'),
        (date(2030, 1, 2), b'"2030-01-02"'),
        (UUID(int=1), b'"00000000-0000-0000-0000-000000000001"'),
        (Decimal("0.10"), b'"0.10"'),
        (Colour.RED, b'"red"'),
        ({"size": Size.SMALL}, b'{"size":1}'),
        (frozenset({7}), b"[7]"),
        (WordsReading(value=math.inf), b'{"value":"Infinity"}'),
        ({"note": "null"}, b'{"note":"null"}'),
        (LooseReading(value=None), b'{"value":null}'),
    ],
)
def test_values_are_written_as_one_would_expect(value: object, expected: bytes) -> None:
    assert encode(value, "order.created") == (expected, JSON)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(math.nan, id="a float"),
        pytest.param({"readings": [1.0, math.inf]}, id="deep in a list"),
        pytest.param({math.nan: 1}, id="a key"),
        pytest.param(Reading(value=math.nan), id="a model"),
        pytest.param([Reading(value=-math.inf)], id="a model in a list"),
        pytest.param(LooseReading(value=math.nan), id="a model's field of any type"),
        pytest.param(LooseReading(value={"deep": [math.inf]}), id="deep in a model's field of any type"),
        pytest.param(ConstantsReading(value=math.nan), id="a model configured to write constants"),
        pytest.param(Wrapped(reading=ConstantsReading(value=math.inf)), id="a model within, configured so"),
    ],
)
def test_a_number_that_json_lacks_is_refused_and_never_becomes_null(value: object) -> None:
    with pytest.raises(BodyNotJson, match=r"sensor\.read"):
        encode(value, "sensor.read")


def test_two_keys_that_become_one_are_refused_because_a_value_would_be_lost() -> None:
    with pytest.raises(BodyNotJson):
        encode({1: "one", "1": "also one"}, "order.created")


@pytest.mark.parametrize(
    ("annotation", "body", "expected"),
    [
        (NO_ANNOTATION, b'{"id":1}', {"id": 1}),
        (NO_ANNOTATION, b" 1 ", 1),
        (NO_ANNOTATION, b"not json", b"not json"),
        (NO_ANNOTATION, b"", b""),
        (NO_ANNOTATION, b"\xff\xfe", b"\xff\xfe"),
        (NO_ANNOTATION, b"[" * 100_000, b"[" * 100_000),
        (NO_ANNOTATION, b"9" * 5000, b"9" * 5000),
        (Any, b'{"id":1}', {"id": 1}),
        (Any, b"\x00", b"\x00"),
        (bytes, b'{"id":1}', b'{"id":1}'),
        (object, b'{"id":1}', {"id": 1}),
        (dict, b'{"id":1}', {"id": 1}),
        (dict[str, int], b'{"id":"1"}', {"id": 1}),
        (int | None, b"null", None),
        (str, b'"pen"', "pen"),
        (Item, b'{"name":"pen"}', Item(name="pen")),
        (list[Item], b'[{"name":"pen"}]', [Item(name="pen")]),
        (Order, b'{"id":1,"items":[]}', Order(1, [])),
        (Line, b'{"id":1}', {"id": 1}),
        (datetime, b'"2030-01-02T03:04:05Z"', datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)),
        (Annotated[int, Field(gt=3)], b"4", 4),
        (Annotated[Cat | Dog, Field(discriminator="kind")], b'{"kind":"dog"}', Dog(kind="dog")),
    ],
)
def test_a_body_becomes_what_the_annotation_says(annotation: Any, body: bytes, expected: object) -> None:
    decoded = decoder(annotation)(body)
    assert decoded == expected
    assert type(decoded) is type(expected)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"NaN", id="NaN"),
        pytest.param(b'{"value":Infinity}', id="Infinity"),
        pytest.param('{"id":1}'.encode("utf-16"), id="UTF-16"),
        pytest.param(b"1\x00", id="a little-endian number that looks like UTF-16"),
    ],
)
def test_what_is_no_strict_json_arrives_as_bytes_where_nothing_is_annotated(body: bytes) -> None:
    assert decoder(NO_ANNOTATION)(body) == body


@pytest.mark.parametrize(
    ("annotation", "body"),
    [
        (Item, b"{}"),
        (Item, b"[]"),
        (Item, b""),
        (Item, b"\xff\xfe"),
        (Item, b'\xef\xbb\xbf{"name":"pen"}'),
        (Item, b"[" * 100_000),
        (int, b'"five"'),
        (int, b"1 2"),
        (int, b"9" * 5000),
        (float, b"NaN1"),
        (float, b"NaN"),
        (float, b" -Infinity"),
        (dict, b'{"a":[NaN]}'),
        (list[Any], b'[["NaN",Infinity]]'),
        (Item, b'{"name":"pen","further":Infinity}'),
        (str, b'"\\ud800"'),
        (Line, b'{"id":null}'),
        (Order, b'{"id":1}'),
        (datetime, b'"yesterday"'),
        (dict[str, int], b'{"a":'),
        (Annotated[int, Field(gt=3)], b"3"),
    ],
)
def test_a_body_that_is_not_what_the_annotation_says_is_undecodable(annotation: Any, body: bytes) -> None:
    with pytest.raises(Undecodable, match="not a valid"):
        decoder(annotation)(body)


def test_a_text_may_speak_of_what_is_no_number() -> None:
    assert decoder(dict)(b'{"NaN":"Infinity"}') == {"NaN": "Infinity"}
    assert decoder(Item)(b'{"name":"-Infinity"}').name == "-Infinity"


@pytest.mark.parametrize(
    ("annotation", "body"),
    [
        pytest.param(int, b'"canary"', id="int"),
        pytest.param(date, b'"canary"', id="date"),
        pytest.param(UUID, b'"canary"', id="UUID"),
        pytest.param(Decimal, b'"canary"', id="Decimal"),
        pytest.param(Colour, b'"canary"', id="enum"),
        pytest.param(Item, b'{"name":["canary"]}', id="model"),
        pytest.param(Item, b"canary", id="no JSON"),
        pytest.param(Literal["a"], b'"canary"', id="literal"),
        pytest.param(Annotated[Cat | Dog, Field(discriminator="kind")], b'{"kind":"canary"}', id="tag of a union"),
    ],
)
def test_an_undecodable_body_is_not_repeated_in_the_error(annotation: Any, body: bytes) -> None:
    with pytest.raises(Undecodable) as caught:
        decoder(annotation)(body)
    assert "canary" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_an_undecodable_body_with_a_thousand_problems_makes_a_short_error() -> None:
    with pytest.raises(Undecodable) as caught:
        decoder(list[int])(b'["x"' + b',"x"' * 1000 + b"]")
    assert len(str(caught.value)) < 4000


@pytest.mark.parametrize(
    "annotation",
    [
        pytest.param(5, id="a number"),
        pytest.param(AsyncEngine, id="a class that JSON cannot fill"),
        pytest.param(AsyncEngine | None, id="the same or nothing"),
        pytest.param(Unfinished, id="a model with an undefined part"),
        pytest.param(list["NowhereDefined"], id="an undefined name"),  # type: ignore[name-defined]  # noqa: F821
    ],
)
def test_an_annotation_that_no_body_can_become_is_refused_before_any_message_comes(annotation: Any) -> None:
    with pytest.raises(ConfigurationError):
        decoder(annotation)


def test_undecodable_is_an_error_of_this_library() -> None:
    assert issubclass(Undecodable, OutboxError)
