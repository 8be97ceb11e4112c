"""The command line."""


def main() -> None:
    """The entry point of the `outbox` command."""
    raise SystemExit("not written yet")
