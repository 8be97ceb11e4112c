"""MysqlLink: connections to a MariaDB. The server greets first, and does not say which command it has completed."""

from __future__ import annotations

import asyncio

from tests.support.proxy import _SIZE, Link, Pair

_QUERY = 3  # COM_QUERY
_DONE = 0  # the first byte of an answer without rows
_HEAD = 4  # bytes: a length of three, and a number


class MysqlLink(Link):
    """Connections to a MariaDB."""

    def trips_behind(self, command: bytes, answer: bytes) -> bool:
        """Whether an answer says that a command was completed, and the tripwire waits for that."""
        if command not in self.tripwire or answer[_HEAD : _HEAD + 1] != bytes([_DONE]):
            return False
        self.tripwire = frozenset()
        self.tripped.set()
        return True


class _MysqlPair(Pair):
    """A client asks one thing after the other, and waits for each answer."""

    _link: MysqlLink
    _command = b""  # the first word of what was asked last
    _to_come = 0  # bytes of a question that has begun

    async def _greeting(self) -> bytes:
        while self._link.swallows:
            await asyncio.sleep(0.05)
        return b""

    async def _pass_on(self, data: bytes, to: asyncio.StreamWriter) -> None:
        if to is self._to_server:
            self._note(data)
        await super()._pass_on(data, to)

    def _note(self, data: bytes) -> None:
        if not self._to_come and len(data) > _HEAD and data[3] == 0 and data[_HEAD] == _QUERY:
            self._command = data[_HEAD + 1 : _HEAD + 64].split()[0].upper() if data[_HEAD + 1 :].strip() else b""
        whole = self._to_come or _HEAD + int.from_bytes(data[:3], "little")
        self._to_come = max(0, whole - len(data))

    async def _answer(self, server: asyncio.StreamReader) -> None:
        while data := await server.read(_SIZE):
            if self._link.trips_behind(self._command, data):
                self.reset()
                return
            await self._pass_on(data, self._to_client)


MysqlLink._kind = _MysqlPair
