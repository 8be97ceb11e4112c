"""What the benchmarks do with what they measure; the measuring itself is `make bench`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from bench import page
from bench.__main__ import PARTS
from bench.processes import program
from bench.programs.payload import SIZE, body
from bench.programs.sink import ANSWER
from bench.report import Report, at_least, at_most, number, spread, summary
from bench.turns import in_turns, ratios


async def test_everybody_is_measured_once_in_each_round() -> None:
    turns: list[str] = []

    async def measure(who: str) -> int:
        turns.append(who)
        return len(turns)

    measured = await in_turns(["ours", "theirs"], 3, measure)
    assert turns == ["ours", "theirs"] * 3
    assert measured == {"ours": [1, 3, 5], "theirs": [2, 4, 6]}
    assert ratios([2.0, 9.0], [4.0, 3.0]) == [0.5, 3.0]


def test_a_target_is_met_by_the_median() -> None:
    assert at_least("rate", 2, [1.0, 2.5, 9.0]).met
    assert not at_least("rate", 2, [1.0, 1.9, 9.0]).met
    assert at_most("time", 25, [90.0, 20.0, 10.0]).met
    assert not at_most("time", 25, [90.0, 26.0, 10.0]).met


def test_numbers_are_no_more_exact_than_the_noise_allows() -> None:
    assert [number(value) for value in (0.1234, 12.345, 1234.5)] == ["0.12", "12.3", "1 234"]
    assert spread([3.0, 1.0, 2.0]) == "2.00 (1.00 to 3.00)"


def test_what_was_not_met_is_said_in_the_summary() -> None:
    report = Report("Drain", "", ("",), [], [at_least("rate", 2, [3.0]), at_most("time", 1, [3.0], " s")])
    assert summary([report]).splitlines()[-2:] == [
        "| rate | ≥ 2.00 | 3.00 | yes |",
        "| time | ≤ 1.00 s | 3.00 s | **no** |",
    ]


def test_a_part_that_is_measured_again_leaves_the_others_and_the_rest_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "benchmarks.md"
    copy.write_text(page.PAGE.read_text())
    monkeypatch.setattr(page, "PAGE", copy)
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results")
    for part, rate in (("drain", 1.0), ("emit", 2.0), ("drain", 3.0)):
        page.keep(part, Report(part, "about", ("", "rate"), [("outbox", number(rate))], [at_least(part, 2, [rate])]))
        page.write(["emit", "drain"])
    before, _, measured = copy.read_text().partition(page.BEGIN)
    assert before.startswith("# Benchmarks")
    assert [line for line in measured.splitlines() if line.startswith(("| emit", "| drain", "| outbox"))] == [
        "| emit | ≥ 2.00 | 2.00 | yes |",
        "| drain | ≥ 2.00 | 3.00 | yes |",
        "| outbox | 2.00 |",
        "| outbox | 3.00 |",
    ]


def test_the_page_says_what_was_measured_last() -> None:
    assert page.rendered(page.PAGE.read_text(), list(PARTS)) == page.PAGE.read_text()


async def test_a_program_answers_by_lines_and_its_processor_time_grows() -> None:
    busy = "import sys\nfor line in sys.stdin: print(sum(range(int(line))), flush=True)"
    async with program([sys.executable, "-c", busy], {}) as running:
        assert await running.asked("10") == "45"
        before = running.processor_time
        await running.asked("1000000")
        assert running.processor_time > before


async def test_the_sink_answers_each_request_once_it_is_there_as_a_whole() -> None:
    request = b"POST / HTTP/1.1\r\nhost: here\r\nContent-Length: 4\r\n\r\nbody"
    async with program([sys.executable, "-m", "bench.programs.sink"], {}) as sink:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(await sink.heard()))
        writer.write(request + request + request[:-1])
        assert await reader.readexactly(2 * len(ANSWER)) == 2 * ANSWER
        writer.write(request[-1:])
        assert await reader.readexactly(len(ANSWER)) == ANSWER
        writer.close()
        await writer.wait_closed()


def test_every_body_has_the_same_size() -> None:
    assert {len(json.dumps(body(count))) for count in (0, 7, 20_099)} == {SIZE}
