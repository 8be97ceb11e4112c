"""Body: values to bytes when they are emitted, bytes to values when a listener asks for them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from inspect import Parameter
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from outbox.core.errors import BodyNotJson, ConfigurationError, Undecodable, named
from outbox.core.message import BYTES, JSON

Decoder = Callable[[bytes], Any]

_NOT_JSON = (TypeError, ValueError, OverflowError, RecursionError, PydanticSerializationError)


_SUSPECT = re.compile(rb"NaN|Infinity|\d{4301}")  # what a model may write and strict JSON or its readers lack


def encode(value: object, routing_key: str) -> tuple[bytes, str]:
    """The body's bytes and their content type: bytes as they are, everything else as strict JSON."""
    try:
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value), BYTES
        if isinstance(value, BaseModel):
            return _encode_model(value), JSON
        return _dumps(value), JSON
    except _NOT_JSON as error:
        raise BodyNotJson(f"the body of {named(routing_key)} cannot be written as strict JSON: {error}") from error


def decoder(annotation: Any) -> Decoder:
    """How a listener's body argument is made; decided once, from its annotation."""
    if annotation is Parameter.empty or annotation is Any:
        return _json_or_bytes
    if annotation is bytes:
        return bytes
    validate: Decoder
    try:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            annotation.model_rebuild()  # an undefined part is said now, not with every message
            validate = annotation.model_validate_json
        else:
            adapter: TypeAdapter[Any] = TypeAdapter(annotation)
            adapter.rebuild()
            validate = adapter.validator.validate_json
    except (PydanticUserError, NameError, SyntaxError) as error:
        raise ConfigurationError(f"a body cannot be made into {annotation!r}: {error}") from error

    def decode(body: bytes) -> Any:
        _check_constants(body)
        try:
            return validate(body)
        except ValidationError as error:
            # The input is left out: bodies do not belong in logs or dead letters' error texts.
            raise Undecodable(str(_without_input(error))) from None

    return decode


def _encode_model(model: BaseModel) -> bytes:
    body = model.model_dump_json().encode()
    if b"null" in body and "ser_json_inf_nan" not in model.model_config:
        # Pydantic writes NaN and infinities as null unless told otherwise: a value would be lost without a word.
        _dumps(model.model_dump())
    if _SUSPECT.search(body):
        json.loads(body, parse_constant=_refuse)
    return body


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


_strict_json = json.JSONDecoder(parse_constant=_refuse).decode  # `json.loads` would make one for each message


def _check_constants(body: bytes) -> None:
    """Pydantic reads NaN and infinities, which are no JSON: no number that a listener would expect."""
    if (b"N" in body and b"NaN" in body) or (b"I" in body and b"Infinity" in body):  # single bytes are found faster
        try:
            json.loads(body, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise Undecodable(f"not a valid JSON: {str(error)[:200]}") from None


def _dumps(value: object) -> bytes:
    _check_keys(value)
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_jsonable).encode()


def _check_keys(value: object) -> None:
    """Two keys that are written alike would lose a value."""
    if isinstance(value, dict):
        if any(not isinstance(key, str) for key in value):
            written = [key if isinstance(key, str) else next(iter(json.loads(json.dumps({key: 0})))) for key in value]
            if len(set(written)) < len(written):
                raise ValueError("two keys become the same")
        for each in value.values():
            _check_keys(each)
    elif isinstance(value, list | tuple):
        for each in value:
            _check_keys(each)


def _jsonable(value: object) -> object:
    if isinstance(value, BaseModel):
        return json.loads(_encode_model(value))
    if is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "__pydantic_serializer__"):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    return to_jsonable_python(value, inf_nan_mode="constants")


def _json_or_bytes(body: bytes) -> Any:
    try:
        return _strict_json(body.decode())
    except (ValueError, RecursionError):
        return body


def _without_input(error: ValidationError) -> str:
    lines = [
        f"{'.'.join(str(part) for part in problem['loc']) or 'body'}: {_said(problem)}"
        for problem in error.errors(include_url=False, include_input=False, include_context=False)
    ]
    return f"not a valid {error.title}: " + "; ".join(lines[:20])


def _said(problem: Any) -> str:
    return "no known tag" if problem["type"] == "union_tag_invalid" else str(problem["msg"])
