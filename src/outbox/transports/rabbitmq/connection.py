"""SupervisedConnection: notices its end and opens again; everything on it is built anew by its users."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta

import aiormq

from outbox.core.backoff import TRANSPORT, Backoff, Outage
from outbox.core.errors import ConfigurationError, TransportClosed, TransportUnavailable
from outbox.core.events import Observer
from outbox.core.loops import cancelled_from_outside
from outbox.transports.rabbitmq.channel import BrokerConnection, Ended, Lost

CONNECT_WITHIN = 5.0  # seconds for the socket, the handshake and the login together
SHORTEST_RECONNECT, LONGEST_RECONNECT = (
    0.1,
    1.0,
)  # seconds between two tries, doubling: a broker that is back is soon found
DISCONNECT_WITHIN = 5.0
TELL_EVERY = 10.0  # seconds between two tellings of the same trouble

_ACCESS_REFUSED, _NOT_ALLOWED = 403, 530
_OTHER_NAMES = (62, 64)  # what OpenSSL calls a host name and an address that a certificate is not for
_OTHER_NAME = "write a host into rabbitmq_url that the certificate is for"
_BADLY_MADE = range(78, 95)  # what only a strict check objects to, which Python does from 3.13 on
_MAKE_ANEW = (
    "from Python 3.13 on a certificate is checked strictly; make this one, or its authority's, anew (an authority's "
    "needs the extensions basicConstraints=critical,CA:TRUE and keyUsage=critical,keyCertSign,cRLSign, and both need "
    "their key identifiers)"
)
_NOT_TRUSTED = "have this machine trust who signed it, or name that authority: amqps://…?cafile=/path/to/ca.pem"

Connect = Callable[[], Awaitable[BrokerConnection]]


class SupervisedConnection:
    """One connection at a time, from `open` to `close`."""

    def __init__(self, connect: Connect, *, name: str, observe: Observer) -> None:
        self._connect = connect
        self._name = name
        self._outage = Outage(name, TRANSPORT, observe)
        self._connection: BrokerConnection | None = None
        self._failure: Exception = ConnectionError("not connected yet")
        self._tried = asyncio.Event()  # the first try is over
        self._connected = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._was_connected = False
        self._told: tuple[str, float] = ("", 0.0)  # the last trouble, and when it was told

    async def open(self) -> None:
        """Try once to connect. Who is not there yet may come; who refuses us from the beginning goes on doing so."""
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep(), name=f"outbox {self._name}")
        await self._tried.wait()
        refused = isinstance(self._failure, ConfigurationError) and not self._was_connected
        if self._connection is None and (refused or isinstance(self._failure, TransportClosed)):
            raise self._failure

    async def connection(self, within: float = 0.0) -> BrokerConnection:
        """The connection; TransportUnavailable if there is none within so many seconds."""
        await self.open()
        if self._connection is None and within:
            with suppress(TimeoutError):
                async with asyncio.timeout(within):
                    await self._connected.wait()
        if self._connection is None:
            if isinstance(self._failure, TransportClosed):
                raise self._failure
            raise TransportUnavailable(f"RabbitMQ is away: {self._failure}")
        return self._connection

    def _blocked(self, reason: str) -> None:
        self._outage.struck(blocked(reason), timedelta(0))

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping], timeout=DISCONNECT_WITHIN)
            self._keeping = None

    async def _keep(self) -> None:
        pace = Backoff(LONGEST_RECONNECT, SHORTEST_RECONNECT)
        try:
            while True:
                try:
                    await self._once(pace)
                except TransportClosed as error:
                    self._failure = error
                    self._connected.set()
                    return
                except Exception as error:  # whatever it is, the next try may go better
                    if cancelled_from_outside():
                        raise asyncio.CancelledError from error  # the client library told of it by an error of its own
                    self._failure = error
                self._tried.set()
                pause = pace.pause()
                self._tell(self._failure, pause)
                await asyncio.sleep(pause)
        finally:
            self._tried.set()

    def _tell(self, failure: Exception, pause: float) -> None:
        """Report a problem when it is new, and then from time to time."""
        words, now = str(failure), time.monotonic()
        before, told_at = self._told
        if words != before or now - told_at > TELL_EVERY:
            self._told = words, now
            self._outage.struck(failure, timedelta(seconds=pause))

    async def _once(self, pace: Backoff) -> None:
        """From one opening to its end."""
        try:
            async with asyncio.timeout(CONNECT_WITHIN):
                connection = await self._connect()
        except TimeoutError:
            raise TransportUnavailable(f"no answer within {CONNECT_WITHIN:g} s") from None
        try:
            pace.reset()
            self._connection, self._was_connected, self._told = connection, True, ("", 0.0)
            self._outage.over()
            connection.on_blocked, connection.on_unblocked = self._blocked, self._outage.over
            self._tried.set()
            self._connected.set()
            ended = await asyncio.shield(connection.ended)
            self._failure = ConnectionError(ended.text)
        finally:
            self._connection = None
            self._connected.clear()
            with suppress(Exception):
                async with asyncio.timeout(DISCONNECT_WITHIN):
                    await connection.close()


def blocked(reason: str) -> TransportUnavailable:
    """What a publisher is told while the broker has an alarm."""
    return TransportUnavailable(f"RabbitMQ takes no messages at the moment: {reason}")


def refusal(error: BaseException, where: str) -> Exception:
    """What a failed try to connect means. The client library's texts may repeat the URL, and with it the password."""
    match error:
        case aiormq.exceptions.ProbableAuthenticationError() | aiormq.exceptions.AuthenticationError():
            return ConfigurationError(f"{where} refuses the user or its password: check rabbitmq_url")
        case Lost(ended=Ended(text, code)) if code == _ACCESS_REFUSED:
            return ConfigurationError(f"{where} refuses the user or its password ({text}): check rabbitmq_url")
        case Lost(ended=Ended(text, code)) if code == _NOT_ALLOWED:
            return ConfigurationError(f"{where}: {text}: check rabbitmq_url and what its user may do")
        case BaseException(__cause__=ssl.SSLCertVerificationError(verify_code=code, verify_message=text)):
            way_out = _OTHER_NAME if code in _OTHER_NAMES else _MAKE_ANEW if code in _BADLY_MADE else _NOT_TRUSTED
            return ConfigurationError(f"{where} has a certificate that is refused ({text}): {way_out}")
        case FileNotFoundError() | PermissionError() | ssl.SSLError():
            return ConfigurationError(
                f"{where}: a cafile, certfile or keyfile that rabbitmq_url names cannot be read ({_text(error)})"
            )
        case _:
            return TransportUnavailable(f"{where}: {_words(error)}")


def _text(error: OSError) -> str:
    return error.strerror or type(error).__name__


def _words(error: BaseException) -> str:
    cause = error.__cause__
    if isinstance(cause, ConnectionError) and cause.errno:
        return os.strerror(cause.errno)  # asyncio's own text names only what it called
    if isinstance(cause, OSError):
        return _text(cause)
    told = isinstance(error, aiormq.exceptions.AMQPError | Lost) and error.args
    return str(error.args[-1]) if told else type(error).__name__
