"""Hostile requests: one function for each kind, which writes as many as it is asked for, the same with every run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from outbox.core.webhooks import Secrets, sign
from tests.support.sending import BATCHED, STRUCTURED, attributes, batched, binary, structured, webhook

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
FOREIGN_SECRET = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"

SECRETS = {secret: Secrets(secret) for secret in (SECRET, FOREIGN_SECRET)}  # keys are prepared once

AT_ONCE = 25  # requests

DECLINED = frozenset({400, 401, 404, 405, 408, 409, 413, 415, 422})
READ = DECLINED | {202}  # a sender with the secret may send what it likes

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Hostile:
    """A request as a server hands it over, and what it may be answered."""

    headers: Headers
    body: Sequence[bytes] = (b"",)  # as it comes
    path: str = "/"
    method: str = "POST"
    ends: str = "http.request"  # what comes after the last part
    answers: frozenset[int] = field(default=DECLINED)


def raw(headers: Mapping[str, str]) -> Headers:
    return [(name.encode("latin-1"), value.encode("utf-8")) for name, value in headers.items()]


def signing(body: bytes, id: str = "1", secret: str = SECRET, at: float | None = None) -> dict[str, str]:
    return sign(SECRETS[secret], id, int(time.time() if at is None else at), body)


def signed(headers: Mapping[str, str], body: bytes, id: str = "1", **more: Any) -> Hostile:
    return Hostile(raw({**headers, **signing(body, id)}), [body], answers=READ, **more)


def originals(random: Random, number: int) -> tuple[Mapping[str, str], bytes, str]:
    """A good request in one of the modes, and its id."""
    id = f"{random.getrandbits(64):x}-{number}"
    kind = random.choice(["structured", "batched", "binary", "webhook"])
    if kind == "structured":
        return (*structured(number, id=id), id)
    if kind == "batched":
        return (*batched(*(attributes(f"{id}-{each}", data=each) for each in range(3))), id)
    if kind == "binary":
        return (*binary(number, id=id), id)
    return {"content-type": "application/json"}, webhook()[1], id


def cut_bodies(random: Random, count: int) -> Iterator[Hostile]:
    """Signed as a whole and cut on the way, or cut and then signed."""
    for number in range(count):
        headers, body, id = originals(random, number)
        cut = body[: random.randrange(len(body))]
        if number % 2:
            yield Hostile(raw({**headers, **signing(body, id)}), [cut], answers=frozenset({401}))
        else:
            yield signed(headers, cut, id)


def cut_connections(random: Random, count: int) -> Iterator[Hostile]:
    """The sender leaves in the middle, or at once."""
    for number in range(count):
        headers, body, id = originals(random, number)
        middle = random.randrange(len(body))
        parts = [body[:middle]] if number % 3 else []
        yield Hostile(raw({**headers, **signing(body, id)}), parts, ends="http.disconnect", answers=frozenset({400}))


def forged_signatures(random: Random, count: int) -> Iterator[Hostile]:
    for number in range(count):
        headers, body, id = originals(random, number)
        yield Hostile(raw({**headers, **forged(random, number, body, id)}), [body], answers=frozenset({401}))


def forged(random: Random, number: int, body: bytes, id: str) -> dict[str, str]:
    """The three headers, none of which was made with the secret over exactly this."""
    good = signing(body, id)
    signature = good["webhook-signature"]
    now = int(time.time())
    ways: list[Callable[[], dict[str, str]]] = [
        lambda: signing(body, id, FOREIGN_SECRET),
        lambda: signing(body + b" ", id),
        lambda: good | {"webhook-id": id + "0"},
        lambda: good | {"webhook-timestamp": str(now + random.choice([-300, -5, -1, 1, 5, 300]))},
        lambda: signing(body, id, at=now - random.randrange(310, 10**9)),
        lambda: signing(body, id, at=now + random.randrange(310, 10**9)),
        lambda: good | {"webhook-signature": changed(random, signature)},
        lambda: good | {"webhook-signature": signature[: random.randrange(len(signature))]},
        lambda: (
            good | {"webhook-signature": signature.replace("v1", random.choice(["v0", "v2", "V1", "v1a", "", "*"]))}
        ),
        lambda: good | {"webhook-signature": " ".join(f"v1,{random.getrandbits(256):x}" for _ in range(40))},
        lambda: good | {"webhook-timestamp": random.choice(["", "-1", "1e9", "0x1", "9" * 400, "NaN", " 1", "\u0661"])},
        lambda: good | {"webhook-id": random.choice(["", ".", f"{id}.{now}", "ä", "a.b", f"{id}."])},
        lambda: dict(random.sample(list(good.items()), 2)),
    ]
    return ways[number % len(ways)]()


def changed(random: Random, signature: str) -> str:
    """One character of the base64, one that counts: the last ones also hold bits that are thrown away."""
    at = random.randrange(3, len(signature) - 2)
    other = "A" if signature[at] != "A" else "B"
    return signature[:at] + other + signature[at + 1 :]


def replayed(random: Random, count: int) -> Iterator[Hostile]:
    """Captured ones, as something else: as many originals as are sent at once, and four others of each."""
    for block in range(0, count, 5 * AT_ONCE):
        captured = [originals(random, block + number) for number in range(AT_ONCE)]
        signatures = [signing(body, id) for _, body, id in captured]
        for (headers, body, _), signature in zip(captured, signatures, strict=True):
            yield Hostile(raw({**headers, **signature}), [body], answers=frozenset({202}))
        for (_, body, id), signature in zip(captured, signatures, strict=True):
            for headers, path in others(random, id):
                yield Hostile(raw({**headers, **signature}), [body], path)


def others(random: Random, id: str) -> list[tuple[Mapping[str, str], str]]:
    type, source = random.choice(["order.refunded", "refund.approved"]), random.choice(["/bank", "/shop"])
    return [
        (binary(id=id, type=type, source=source)[0], "/"),
        (binary(id=f"{id}0", type=type, source=source)[0], "/"),
        ({"content-type": "application/json"}, f"/{type}"),
        ({"content-type": "application/json"}, f"/{type}/0"),
    ]


def header_forms(random: Random, count: int) -> Iterator[Hostile]:
    """Names and values that no sender with a good library writes."""
    names = ["ce-id", "ce-type", "ce-source", "ce-time", "ce-expirytime", "ce-outboxtrackingids", "ce-outboxheaders"]
    names += ["ce-outboxduetime", "ce-", "ce-ä", "ce-A b", "content-type", "content-length", "webhook-id", "ce-subject"]
    values = [
        b"",
        b"%",
        b"%zz",
        b"%ff%fe",
        b"%00",
        b"%0d%0a",
        b"\xff\xfe",
        b'"',
        b'"\\"',
        b"x" * 70_000,
        b"%F0%9F%92%A9",
    ]
    values += [
        b"9999-12-31T23:59:59Z",
        b"0001-01-01T00:00:00+23:59",
        b"{}",
        b"[[[[",
        b'{"a":1}',
        b",,,,",
        b"%2C" * 5000,
    ]
    values += [b"\xe2\x80\xa8", b"%E2%80%AE", b"application/cloudevents", b"application/cloudevents+json;charset=\xff"]
    for number in range(count):
        headers, body, id = originals(random, number)
        written = raw({**headers, **signing(body, id)})
        for _ in range(random.randrange(1, 4)):
            name, value = random.choice(names).encode("latin-1"), random.choice(values)
            if random.random() < 0.5:
                written = [each for each in written if each[0] != name]
            written.append((random.choice([name, name.upper()]), value))
        yield Hostile(written, [body], answers=READ)


def bad_json(random: Random, count: int) -> Iterator[Hostile]:
    """Signed, and then not what it says."""
    pieces = [
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"9" * 5000,
        b"[" * 3000,
        b'{"a":' * 3000,
        b'"\\ud800"',
        b"\xff",
        b"\xef\xbb\xbf",
    ]
    pieces += [
        b"\x00",
        b'"data":1,',
        b'"id":"2",',
        b"null",
        b"true",
        b"{}",
        b"[]",
        b'""',
        b",",
        b"}",
        b"]",
        b'"',
        b"\\u0000",
    ]
    pieces += [b'"time":"9999-12-31T23:59:59Z",', b'"data_base64":"%%%",', b'"specversion":"1.0",', b'"type":7,']
    for number in range(count):
        headers, body, id = originals(random, number)
        for _ in range(random.randrange(1, 3)):
            at = random.randrange(len(body) + 1)
            body = body[:at] + random.choice(pieces) + body[at + random.choice([0, 0, 1, 5]) :]
        yield signed(headers, body, id)


def wrong_modes(random: Random, count: int) -> Iterator[Hostile]:
    """A body of one mode with the headers of another; methods, paths and types of content that are none."""
    types = [
        STRUCTURED["content-type"],
        BATCHED["content-type"],
        "application/cloudevents+avro",
        "application/json",
        "",
    ]
    types += [
        "application/cloudevents-batch",
        "APPLICATION/CLOUDEVENTS+JSON",
        "text/html",
        "application/json;" * 500,
        "/json",
    ]
    paths = ["/", "", "//", "/" * 3000, "/order.paid", "/\x00", "/\r\n", "/%2e%2e", "/ö", "/#", "/" + "x" * 300, "/*"]
    for number in range(count):
        headers, body, id = originals(random, number)
        headers = {**headers, "content-type": random.choice(types)}
        if number % 4 == 0:
            headers["content-encoding"] = random.choice(["gzip", "br", "identity, gzip", ""])
        method = random.choice(["POST"] * 6 + ["GET", "PUT", "HEAD", "OPTIONS", "post", "\x00"])
        yield signed(headers, body, id, path=random.choice(paths), method=method)


def huge_batches(random: Random, count: int) -> Iterator[Hostile]:
    """More events than are read at once, with the secret."""
    for number in range(count):
        size, event = (
            (random.choice([1001, 1500, 5000]), json.dumps(attributes("1")).encode()) if number else (40_000, b"{}")
        )
        body = b"[" + b",".join([event] * size) + b"]"
        yield Hostile(raw({**BATCHED, **signing(body, str(number))}), [body], answers=frozenset({413}))


def huge_bodies(random: Random, count: int) -> Iterator[Hostile]:
    """Larger than is taken, in many parts and without a length."""
    for number in range(count):
        part = b" " * random.choice([65_536, 1_000_000])
        headers = raw({**STRUCTURED, **signing(b"x", str(number))})
        yield Hostile(headers, [part] * (5_000_000 // len(part)), answers=frozenset({413}))


def many_signatures(random: Random, count: int) -> Iterator[Hostile]:
    """Headers as long as servers take them, and a body of two megabytes to compare each with."""
    for number in range(count):
        headers, _, id = originals(random, number)
        body = json.dumps({"type": "order.created", "data": "x" * 2_000_000}).encode()
        signature = " ".join(["v1,AA"] * (30 if number % 2 else random.choice([33, 500, 8000])))
        forging = {**signing(body, id), "webhook-signature": signature}
        yield Hostile(raw({**headers, **forging}), [body], answers=frozenset({401}))


def unsigned(random: Random, count: int) -> Iterator[Hostile]:
    """Good but for the signature, of which there is nothing: declined before a byte is read."""
    for number in range(count):
        headers, body, _ = originals(random, number)
        yield Hostile(raw(headers), [body], ends="never", answers=frozenset({401}))


GROUPS: Mapping[str, tuple[Callable[[Random, int], Iterator[Hostile]], int]] = {
    "cut bodies": (cut_bodies, 900),
    "cut connections": (cut_connections, 600),
    "forged signatures": (forged_signatures, 1300),
    "many signatures": (many_signatures, 12),
    "replayed as something else": (replayed, 750),
    "header forms": (header_forms, 900),
    "bad JSON": (bad_json, 900),
    "wrong modes": (wrong_modes, 700),
    "huge batches": (huge_batches, 12),
    "huge bodies": (huge_bodies, 20),
    "not signed": (unsigned, 400),
}
