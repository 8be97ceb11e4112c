"""Webhooks: what is signed here others verify, what others sign is verified here, and nothing else is."""

from __future__ import annotations

import traceback
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import standardwebhooks

from outbox import ConfigurationError, SignatureInvalid
from outbox.core import webhooks
from outbox.core.webhooks import HEADERS, ID, SIGNATURE, TIMESTAMP, Secrets, claimed, sign, verify

KEY = bytes(range(32))
OTHER_KEY = bytes(range(100, 140))
TEXT = "whsec_" + b64encode(KEY).decode()
OTHER_TEXT = "whsec_" + b64encode(OTHER_KEY).decode()
NOW = 1_700_000_000
BODY = '{"id":1,"name":"Zoë"}'.encode()

OURS = Secrets(TEXT)


def signed(id: str = "msg_1", timestamp: int = NOW, body: bytes = BODY, secrets: Secrets = OURS) -> dict[str, str]:
    return sign(secrets, id, timestamp, body)


# Signing.


def test_the_specifications_example_gets_its_signature() -> None:
    secrets = Secrets("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    headers = sign(secrets, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert headers == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


@pytest.mark.parametrize("body", [BODY, b"{}", b"", "ü€😀".encode(), b"x" * 100_000])
def test_what_we_sign_others_verify(body: bytes) -> None:
    now = int(datetime.now(UTC).timestamp())
    webhook = standardwebhooks.Webhook(TEXT)
    headers = signed(timestamp=now, body=body)
    if body[:1] != b"{":
        assert webhook.sign("msg_1", datetime.fromtimestamp(now, UTC), body.decode()) == headers[SIGNATURE]
    else:
        webhook.verify(body, headers)


def test_what_others_sign_we_verify() -> None:
    moment = datetime.fromtimestamp(NOW, UTC)
    signature = standardwebhooks.Webhook(TEXT).sign("msg_1", moment, BODY.decode())
    assert verify(OURS, {ID: "msg_1", TIMESTAMP: str(NOW), SIGNATURE: signature}, BODY, NOW) == "msg_1"


@pytest.mark.parametrize("id", ["msg.1", "a.b.c", "order.123456789", "msg_1.", "v1.2b3", "1700000000.a"])
def test_ids_may_have_dots_as_they_may_for_others(id: str) -> None:
    assert verify(OURS, by_others(id), BODY, NOW) == id


def test_while_secrets_are_changed_both_sign_and_either_verifies() -> None:
    both = Secrets(OTHER_TEXT, TEXT)
    headers = signed(secrets=both)
    assert len(headers[SIGNATURE].split(" ")) == 2
    assert verify(OURS, headers, BODY, NOW) == "msg_1"
    assert verify(Secrets(OTHER_KEY), headers, BODY, NOW) == "msg_1"
    assert verify(both, signed(), BODY, NOW) == "msg_1"
    now = int(datetime.now(UTC).timestamp())
    for text in (TEXT, OTHER_TEXT):
        standardwebhooks.Webhook(text).verify(BODY, signed(timestamp=now, secrets=both))


def test_the_id_is_the_same_with_every_attempt_and_the_signature_is_not() -> None:
    first, second = signed(), signed(timestamp=NOW + 60)
    assert first[ID] == second[ID]
    assert first[SIGNATURE] != second[SIGNATURE]
    assert first.keys() == HEADERS


@pytest.mark.parametrize("id", ["a.b", "a b", "ü", "a\r\nx: y", "a%2Eb", "x" * 255])
def test_an_id_that_no_header_could_hold_is_written_otherwise(id: str) -> None:
    headers = signed(id)
    assert headers[ID].isascii()
    assert not set(headers[ID]) & set(". \r\n")
    assert verify(OURS, headers, BODY, NOW) == headers[ID]


def test_ids_that_differ_stay_different() -> None:
    written = [signed(id)[ID] for id in ("a.b", "a%2Eb", "a%252Eb", "ab", "a b")]
    assert len(set(written)) == len(written)


# Verifying.


def without(name: str) -> dict[str, str]:
    return {each: value for each, value in signed().items() if each != name}


def flipped(signature: str) -> str:
    return signature[:10] + ("A" if signature[10] != "A" else "B") + signature[11:]


def by_others(id: str) -> dict[str, str]:
    signature = standardwebhooks.Webhook(TEXT).sign(id, datetime.fromtimestamp(NOW, UTC), BODY.decode())
    return {ID: id, TIMESTAMP: str(NOW), SIGNATURE: signature}


GOOD = signed()
TAMPERED: dict[str, tuple[dict[str, str], bytes]] = {
    "no id": (without(ID), BODY),
    "no timestamp": (without(TIMESTAMP), BODY),
    "no signature": (without(SIGNATURE), BODY),
    "no headers": ({}, BODY),
    "empty id": ({**GOOD, ID: ""}, BODY),
    "empty timestamp": ({**GOOD, TIMESTAMP: ""}, BODY),
    "empty signature": ({**GOOD, SIGNATURE: ""}, BODY),
    "another id": ({**GOOD, ID: "msg_2"}, BODY),
    "id with a space": ({**GOOD, ID: "msg_1 "}, BODY),
    "id in capitals": ({**GOOD, ID: "MSG_1"}, BODY),
    "id with a dot": (signed() | {ID: f"msg_1.{NOW}"}, BODY),
    "id that took the time along": (signed(body=f"{NOW}.x".encode()) | {ID: f"msg_1.{NOW}"}, b"x"),
    "id that took more along": (signed(body=f"a.{NOW}.x".encode()) | {ID: f"msg_1.{NOW}.a"}, b"x"),
    "id that begins with a dot": (by_others(".msg_1"), BODY),
    "id that is not ASCII": ({**GOOD, ID: "msg_ü"}, BODY),
    "a second later": ({**GOOD, TIMESTAMP: str(NOW + 1)}, BODY),
    "a second earlier": ({**GOOD, TIMESTAMP: str(NOW - 1)}, BODY),
    "timestamp with a zero before it": ({**GOOD, TIMESTAMP: f"0{NOW}"}, BODY),
    "timestamp with a sign": ({**GOOD, TIMESTAMP: f"+{NOW}"}, BODY),
    "negative timestamp": ({**GOOD, TIMESTAMP: f"-{NOW}"}, BODY),
    "timestamp with a fraction": ({**GOOD, TIMESTAMP: f"{NOW}.0"}, BODY),
    "timestamp with a space": ({**GOOD, TIMESTAMP: f" {NOW}"}, BODY),
    "timestamp with an underscore": ({**GOOD, TIMESTAMP: "1_700_000_000"}, BODY),
    "timestamp in hexadecimal": ({**GOOD, TIMESTAMP: hex(NOW)}, BODY),
    "timestamp with an exponent": ({**GOOD, TIMESTAMP: "17e8"}, BODY),
    "timestamp in milliseconds": ({**GOOD, TIMESTAMP: f"{NOW}000"}, BODY),
    "timestamp that is no number": ({**GOOD, TIMESTAMP: "now"}, BODY),
    "timestamp not a number": ({**GOOD, TIMESTAMP: "NaN"}, BODY),
    "timestamp in other digits": ({**GOOD, TIMESTAMP: "\u0661\u0667" + "\u0660" * 8}, BODY),
    "timestamp without end": ({**GOOD, TIMESTAMP: "9" * 5000}, BODY),
    "another body": (GOOD, b'{"id":2}'),
    "body with a space more": (GOOD, BODY + b" "),
    "body with a byte less": (GOOD, BODY[:-1]),
    "empty body": (GOOD, b""),
    "body in another encoding": (GOOD, BODY.decode().encode("latin-1")),
    "body with other line ends": (signed(body=b"a\nb"), b"a\r\nb"),
    "one character of the signature": ({**GOOD, SIGNATURE: flipped(GOOD[SIGNATURE])}, BODY),
    "signature without its version": ({**GOOD, SIGNATURE: GOOD[SIGNATURE][3:]}, BODY),
    "signature of version 2": ({**GOOD, SIGNATURE: "v2" + GOOD[SIGNATURE][2:]}, BODY),
    "signature of version 1a": ({**GOOD, SIGNATURE: "v1a" + GOOD[SIGNATURE][2:]}, BODY),
    "signature in lower case": ({**GOOD, SIGNATURE: GOOD[SIGNATURE].lower()}, BODY),
    "half a signature": ({**GOOD, SIGNATURE: GOOD[SIGNATURE][:20]}, BODY),
    "signature without its padding": ({**GOOD, SIGNATURE: GOOD[SIGNATURE].rstrip("=")}, BODY),
    "signature and more": ({**GOOD, SIGNATURE: GOOD[SIGNATURE] + "x"}, BODY),
    "signatures with a comma between": ({**GOOD, SIGNATURE: f"v1,AAAA,{GOOD[SIGNATURE]}"}, BODY),
    "only the version": ({**GOOD, SIGNATURE: "v1,"}, BODY),
    "only spaces": ({**GOOD, SIGNATURE: "   "}, BODY),
    "many signatures, none right": ({**GOOD, SIGNATURE: " ".join(["v1,AAAA"] * 500)}, BODY),
    "signature that is not ASCII": ({**GOOD, SIGNATURE: "v1,ü"}, BODY),
    "somebody else's secret": (signed(secrets=Secrets(OTHER_TEXT)), BODY),
    "the secret's text as the key": (signed(secrets=Secrets(TEXT.encode())), BODY),
    "parts moved over their border": (
        {ID: "msg_1", TIMESTAMP: str(NOW), SIGNATURE: signed(id="msg", body=b"x")[SIGNATURE]},
        b"x",
    ),
}


def test_there_are_enough_tampered_cases() -> None:
    assert len(TAMPERED) >= 30


@pytest.mark.parametrize("case", TAMPERED)
def test_a_tampered_webhook_is_refused(case: str) -> None:
    headers, body = TAMPERED[case]
    with pytest.raises(SignatureInvalid) as raised:
        verify(OURS, headers, body, NOW)
    assert GOOD[SIGNATURE][3:] not in str(raised.value)


def test_the_same_webhook_untampered_is_let_through() -> None:
    assert verify(OURS, GOOD, BODY, NOW) == "msg_1"
    assert verify(OURS, {**GOOD, SIGNATURE: f"v1a,xyz v1,AAAA {GOOD[SIGNATURE]}"}, BODY, NOW) == "msg_1"


@pytest.mark.parametrize(("offset", "within"), [(-301, False), (-299, True), (0, True), (299, True), (301, False)])
def test_clocks_may_differ_by_the_tolerance_to_either_side(offset: int, within: bool) -> None:
    if within:
        assert verify(OURS, GOOD, BODY, NOW + offset) == "msg_1"
    else:
        with pytest.raises(SignatureInvalid, match="time"):
            verify(OURS, GOOD, BODY, NOW + offset)


def test_the_tolerance_can_be_chosen() -> None:
    assert verify(OURS, GOOD, BODY, NOW + 3000, timedelta(hours=1)) == "msg_1"
    with pytest.raises(SignatureInvalid):
        verify(OURS, GOOD, BODY, NOW + 2, timedelta(seconds=1))


# Secrets.


@pytest.mark.parametrize("length", [24, 25, 26, 32])
def test_a_secret_may_lack_its_padding_as_it_may_for_others(length: int) -> None:
    whole = "whsec_" + b64encode(bytes(length)).decode()
    assert Secrets(whole.rstrip("=")).signatures(BODY) == Secrets(whole).signatures(BODY)


@pytest.mark.parametrize(
    "secret",
    [
        "",
        "whsec_",
        "whsec_" + b64encode(b"x" * 23).decode(),
        "whsec_" + b64encode(b"x" * 65).decode(),
        "whsec_not base64!",
        b64encode(KEY).decode(),
        "whsk_" + b64encode(KEY).decode(),
        b"short",
        b"x" * 65,
        None,
        987654321,
        ["whsec_"],
    ],
)
def test_what_is_no_secret_is_refused_without_being_shown(secret: Any) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Secrets(secret)
    shown = "".join(traceback.format_exception(raised.value))
    assert not secret or str(secret) not in shown.replace("whsec_` and", "")


def test_no_secret_at_all_is_refused() -> None:
    nothings: tuple[Any, ...] = ((), [], iter(()))
    for nothing in nothings:
        with pytest.raises(ConfigurationError, match="no webhook secret"):
            Secrets.of(nothing)


def test_a_body_is_read_once_for_each_secret_however_many_signatures_a_sender_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digests = []
    digest = webhooks._digest

    def counted(key: Any, content: bytes) -> bytes:
        digests.append(content)
        return digest(key, content)

    monkeypatch.setattr(webhooks, "_digest", counted)
    secrets = Secrets(KEY, OTHER_KEY)
    for headers in ({**GOOD, SIGNATURE: " ".join(["v1,AAAA"] * 32)}, {**GOOD, SIGNATURE: "v1,AAAA"}):
        digests.clear()
        with pytest.raises(SignatureInvalid, match="no signature"):
            verify(secrets, headers, BODY, NOW)
        assert len(digests) == 2


def test_more_signatures_than_a_sender_needs_are_declined_before_the_body_is_read() -> None:
    good = GOOD[SIGNATURE]
    assert claimed({**GOOD, SIGNATURE: " ".join(["v1,AAAA"] * 31 + [good])}, NOW).signatures[-1] == good.encode()
    with pytest.raises(SignatureInvalid, match="more than 32 signatures"):
        claimed({**GOOD, SIGNATURE: " ".join(["v1,AAAA"] * 32 + [good])}, NOW)


def test_secrets_are_given_in_many_ways() -> None:
    content = b"x"
    expected = Secrets(KEY, OTHER_KEY).signatures(content)
    for given in ([TEXT, OTHER_TEXT], (KEY, OTHER_TEXT), Secrets(TEXT, OTHER_KEY)):
        assert Secrets.of(given).signatures(content) == expected
    assert Secrets.of(TEXT).signatures(content) == Secrets.of(KEY).signatures(content) == expected[:1]


def test_secrets_are_never_shown() -> None:
    secrets = Secrets(TEXT, OTHER_KEY)
    for shown in (repr(secrets), str(secrets), f"{secrets}", repr([secrets]), f"{secrets!r:>5}"):
        assert shown.strip("[]") == "<Secrets: 2>"


def test_a_secret_is_found_in_no_error_of_a_failed_verification() -> None:
    with pytest.raises(SignatureInvalid) as raised:
        verify(OURS, {**GOOD, ID: "msg_2"}, BODY, NOW)
    shown = "".join(traceback.format_exception(raised.value))
    assert b64encode(KEY).decode() not in shown
    assert repr(KEY) not in shown
