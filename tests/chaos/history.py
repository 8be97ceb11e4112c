"""History: what processes and the rig say they did, a JSON line at a time, on disk before they go on."""

from __future__ import annotations

import json
import os
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outbox import Message
from outbox.core.cloudevents import SOURCE

COMMITTED, ROLLED_BACK, UNKNOWN = "committed", "rolled back", "unknown"
UNTOLD = "a listener's"  # whose worker commits, and does not tell it


class Historian:
    """Writes one process's history. A line is on disk when `note` returns."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._lock = threading.Lock()

    def note(self, event: str, **facts: object) -> None:
        line = json.dumps({"event": event, "at": time.time(), **facts}) + "\n"
        with self._lock:
            os.write(self._file, line.encode())
            os.fsync(self._file)


def original_id(message: Message) -> str:
    """The one that its producer knows: what came over HTTP has another one here, made of this and its source."""
    return message.tracking_ids[-2] if SOURCE in message.headers else message.id


@dataclass(frozen=True)
class Emitted:
    """A message as its producer made it."""

    id: str
    routing_key: str
    body: bytes
    headers: Mapping[str, str]
    key: str | None
    content_type: str
    fate: str = field(default="", compare=False)  # known to its producer alone

    @classmethod
    def of(cls, message: Message, fate: str = "") -> Emitted:
        return cls(
            id=original_id(message),
            routing_key=message.routing_key,
            body=message.body,
            headers={name: value for name, value in message.headers.items() if name != SOURCE},
            key=message.key,
            content_type=message.content_type,
            fate=fate,
        )

    def as_facts(self) -> dict[str, Any]:
        return {**vars(self), "body": b64encode(self.body).decode()}

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> Emitted:
        return cls(**{**facts, "body": b64decode(facts["body"])})


@dataclass
class Transaction:
    """What a producer, or a listener that replies, meant to commit: a row of its own, and these messages."""

    number: str
    messages: tuple[Emitted, ...]
    taken_back: tuple[str, ...] = ()  # ids of messages whose savepoint was rolled back
    outcome: str = UNKNOWN  # as far as the producer could tell


@dataclass(frozen=True)
class Run:
    """A listener's run for a message began; `failed` if it then failed on purpose."""

    message_id: str
    queue: str
    attempt: int
    failed: bool = False


@dataclass(frozen=True)
class Struck:
    """A fault that really happened, and when it was over."""

    kind: str
    target: str
    began: float
    ended: float


@dataclass(frozen=True)
class Ending:
    """How a process ended. `started`: it had said that it is at work; `told`: the rig killed or stopped it."""

    process: str
    code: int
    started: bool
    told: bool
    seconds: float = 0.0  # from being told to being gone


@dataclass
class History:
    """Everything that was noted in a run."""

    transactions: list[Transaction] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    faults: list[Struck] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    calm_since: float | None = None  # the last fault was over, and everybody at work
    own_commits: set[tuple[str, str]] = field(default_factory=set)  # messages and queues whose listener committed
    children: set[str] = field(default_factory=set)  # numbers of the transactions that forked processes were to try
    ended: set[str] = field(default_factory=set)  # numbers of transactions whose end was told


def read(folder: Path) -> History:
    """All histories of a folder, as one."""
    history = History()
    for path in sorted(folder.glob("*.jsonl")):
        transactions: dict[str, Transaction] = {}
        for line in _lines(path):
            _enter(line, history, transactions)
        history.transactions += transactions.values()
    return history


def _enter(line: dict[str, Any], history: History, transactions: dict[str, Transaction]) -> None:
    match line:
        case {"event": "intends", "number": number, "messages": messages, "taken_back": taken_back}:
            emitted = tuple(Emitted.from_facts(facts) for facts in messages)
            transactions[number] = Transaction(number, emitted, tuple(taken_back))
        case {"event": "replies", "number": number, "message": facts}:
            transactions[number] = Transaction(number, (Emitted.from_facts(facts),), outcome=UNTOLD)
        case {"event": "ended", "number": number, "outcome": outcome}:
            history.ended.add(number)
            if number in transactions:
                transactions[number].outcome = outcome
        case {"event": "forked", "number": number}:
            history.children.add(number)
        case {"event": "own commit", "message": message_id, "queue": queue}:
            history.own_commits.add((message_id, queue))
        case {"event": "began" | "failed" as event, "message": message_id, "queue": queue, "attempt": attempt}:
            history.runs.append(Run(message_id, queue, attempt, failed=event == "failed"))
        case {"event": "fault", "kind": kind, "target": target, "began": began, "ended": ended}:
            history.faults.append(Struck(kind, target, began, ended))
        case {"event": "calm", "at": at}:
            history.calm_since = at
        case {"event": "ending", "process": process, **how}:
            history.endings.append(Ending(process, how["code"], how["started"], how["told"], how["seconds"]))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file; the last one may be torn, if its process was killed while it wrote."""
    lines = path.read_bytes().split(b"\n")
    for line in lines[:-1]:
        yield json.loads(line)
