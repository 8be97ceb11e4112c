"""Page: docs/benchmarks.md, whose measured part is written by the benchmarks themselves.

What a part measured is kept in bench/results until it is measured again, so that a part can have a run of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.report import Report, Target, summary

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/benchmarks.md"
RESULTS = ROOT / "bench/results"

BEGIN = "<!-- measured: written by `make bench ARGS=--write` -->\n"
END = "<!-- end of measured -->\n"


def keep(part: str, report: Report) -> None:
    """Remember what a part measured."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{part}.json").write_text(json.dumps(asdict(report), indent=2, ensure_ascii=False) + "\n")


def write(parts: Sequence[str]) -> None:
    """Put what was measured last between the two marks, in this order."""
    PAGE.write_text(rendered(PAGE.read_text(), parts))


def rendered(page: str, parts: Sequence[str]) -> str:
    """The page with what was measured last."""
    reports = [report for part in parts if (report := _kept(part)) is not None]
    measured = "\n".join([summary(reports), *(report.markdown() for report in reports)])
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{measured}\n{END}{after}"


def _kept(part: str) -> Report | None:
    try:
        values = json.loads((RESULTS / f"{part}.json").read_text())
    except FileNotFoundError:
        return None
    return Report(**values | {"targets": [Target(**target) for target in values["targets"]]})
