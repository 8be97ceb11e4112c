"""Page: docs/benchmarks.md, whose measured part is written by the benchmarks themselves."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs/benchmarks.md"

BEGIN = "<!-- measured: written by `make bench ARGS=--write` -->\n"
END = "<!-- end of measured -->\n"


def write(measured: str) -> None:
    """Put what was measured between the two marks."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{measured}\n{END}{after}")
