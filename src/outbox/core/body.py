"""Body: values to bytes when they are emitted, bytes to values when a listener asks for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from inspect import Parameter
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from outbox.core.errors import BodyNotJson, ConfigurationError, OutboxError
from outbox.core.message import BYTES, JSON

Decoder = Callable[[bytes], Any]

_NOT_JSON = (TypeError, ValueError, OverflowError, RecursionError, PydanticSerializationError)


class Undecodable(OutboxError):
    """The body is not what the listener's annotation says."""


def encode(value: object, routing_key: str) -> tuple[bytes, str]:
    """The body's bytes and their content type: bytes as they are, everything else as strict JSON."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value), BYTES
    try:
        if isinstance(value, BaseModel):
            return _encode_model(value), JSON
        return _dumps(value), JSON
    except _NOT_JSON as error:
        raise BodyNotJson(f"the body of {routing_key!r} cannot be written as strict JSON: {error}") from error


def decoder(annotation: Any) -> Decoder:
    """How a listener's body argument is made; decided once, from its annotation."""
    if annotation is Parameter.empty or annotation is Any:
        return _json_or_bytes
    if annotation is bytes:
        return bytes
    try:
        validate = (
            annotation.model_validate_json
            if isinstance(annotation, type) and issubclass(annotation, BaseModel)
            else TypeAdapter(annotation).validate_json
        )
    except PydanticSchemaGenerationError as error:
        raise ConfigurationError(f"a body cannot be made into {annotation!r}: {error}") from error

    def decode(body: bytes) -> Any:
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
        _dumps(model.model_dump(mode="json"))
    return body


def _dumps(value: object) -> bytes:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_jsonable).encode()


def _jsonable(value: object) -> object:
    return to_jsonable_python(value, inf_nan_mode="constants")


def _json_or_bytes(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body


def _without_input(error: ValidationError) -> str:
    lines = [
        f"{'.'.join(str(part) for part in problem['loc']) or 'body'}: {problem['msg']}"
        for problem in error.errors(include_url=False, include_input=False, include_context=False)
    ]
    return f"not a valid {error.title}: " + "; ".join(lines[:20])
