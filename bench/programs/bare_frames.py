"""Bare frames: the limit of publishing with confirms. No database, one write for a batch, two batches on their way.

Told `publish COUNT` it publishes so many messages, and says how many seconds that took, or ends with `refused`.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import struct
import sys
import time
from urllib.parse import unquote, urlsplit

from pamqp import base, commands, frame, header

from bench.programs.payload import body

BATCH = 500
CHANNEL = 1
_FRAME = struct.Struct(">BHI")
_HEADER = struct.Struct(">BHIHHQ")
_END = b"\xce"
_ACK = struct.pack(">HH", 60, 80)


class Refused(Exception):
    """The broker said something else than that it has the messages."""


class Broker:
    """A blocking connection with one channel in confirm mode."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._socket = socket.create_connection((address.hostname or "127.0.0.1", address.port or 5672))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""
        self._acked = 0
        self._sent = 0
        self._shake_hands(address.username or "guest", address.password or "guest", unquote(address.path[1:]) or "/")
        self._ask(commands.Channel.Open(), CHANNEL)
        self._ask(commands.Confirm.Select(), CHANNEL)

    def publish(self, exchange: str, routing_key: str, bodies: list[bytes]) -> None:
        """Write one batch; wait until no more than this one is unanswered."""
        method = commands.Basic.Publish(exchange=exchange, routing_key=routing_key, mandatory=True)
        route = frame.marshal(method, CHANNEL)
        parts: list[bytes] = []
        for text in bodies:
            self._sent += 1
            properties = _properties(self._sent)
            parts += (
                route,
                _HEADER.pack(2, CHANNEL, 12 + len(properties), 60, 0, len(text)),
                properties,
                _END + _FRAME.pack(3, CHANNEL, len(text)),
                text,
                _END,
            )
        self._socket.sendall(b"".join(parts))
        self.wait_until_acked(self._sent - len(bodies))

    def wait_until_acked(self, number: int | None = None) -> None:
        while self._acked < (self._sent if number is None else number):
            for kind, payload in self._read():
                if kind == 1 and payload[:4] == _ACK:
                    self._acked = max(self._acked, int.from_bytes(payload[4:12], "big"))
                elif kind == 1:
                    raise Refused(repr(payload))

    def _shake_hands(self, user: str, password: str, virtual_host: str) -> None:
        self._socket.sendall(header.ProtocolHeader().marshal())
        self._read()
        answer = commands.Connection.StartOk({}, "PLAIN", f"\0{user}\0{password}", "en_US")
        self._ask(answer, 0)
        self._socket.sendall(frame.marshal(commands.Connection.TuneOk(2047, 131_072, 0), 0))
        self._ask(commands.Connection.Open(virtual_host), 0)

    def _ask(self, method: base.Frame, channel: int) -> None:
        self._socket.sendall(frame.marshal(method, channel))
        self._read()

    def _read(self) -> list[tuple[int, bytes]]:
        """At least one whole frame."""
        frames: list[tuple[int, bytes]] = []
        while not frames:
            received = self._socket.recv(1 << 18)
            if not received:
                raise SystemExit("the broker closed the connection")
            self._buffer += received
            start = 0
            while len(self._buffer) - start >= _FRAME.size:
                kind, _, size = _FRAME.unpack_from(self._buffer, start)
                end = start + _FRAME.size + size + 1
                if end > len(self._buffer):
                    break
                frames.append((kind, self._buffer[start + _FRAME.size : end - 1]))
                start = end
            self._buffer = self._buffer[start:]
        return frames


def _properties(number: int) -> bytes:
    """Content type, persistence and an id: flags, then the values in the order of their bits."""
    message_id = f"bare-{os.getpid():07d}-{number:023d}".encode()
    return b"\x90\x80\x10application/json\x02" + bytes([len(message_id)]) + message_id


def main() -> None:
    broker = Broker(os.environ["BENCH_RABBITMQ_URL"])
    exchange, routing_key = os.environ["BENCH_EXCHANGE"], os.environ["BENCH_ROUTING_KEY"]
    numbers = itertools.count()
    print("ready", flush=True)
    for line in sys.stdin:
        bodies = [json.dumps(body(number)).encode() for number in itertools.islice(numbers, int(line.split()[1]))]
        begun, processor_time = time.monotonic(), time.process_time()
        try:
            for start in range(0, len(bodies), BATCH):
                broker.publish(exchange, routing_key, bodies[start : start + BATCH])
            broker.wait_until_acked()
        except Refused as refused:
            print("refused", refused, flush=True)
            return
        print(time.monotonic() - begun, time.process_time() - processor_time, flush=True)


if __name__ == "__main__":
    main()
