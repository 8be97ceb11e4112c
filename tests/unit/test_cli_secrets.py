"""The command line hides the secrets of its environment, wherever they turn up."""

import pytest

from outbox.cli.secrets import HIDDEN, redacted

ONE, OTHER = "whsec_" + "A" * 32, "whsec_" + "B" * 32


@pytest.mark.parametrize("between", [",", ", ", "\n"])
def test_webhook_secrets_are_hidden_one_by_one(between: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_WEBHOOK_SECRETS", f"{ONE}{between}{OTHER}")
    assert redacted(f"signed with {OTHER} and {ONE}.") == f"signed with {HIDDEN} and {HIDDEN}."


def test_passwords_of_urls_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_TRANSPORT", "https://user:c4n4ry@example.com/hooks?token=s3cret")
    assert redacted("c4n4ry and s3cret") == f"{HIDDEN} and {HIDDEN}"
    assert redacted("https://user:c4n4ry@example.com") == f"https://{HIDDEN}@example.com"
