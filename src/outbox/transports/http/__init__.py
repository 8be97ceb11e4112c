"""HttpTransport: posts each message to a URL as a CloudEvent, signed if there is a secret."""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, Self

import aiohttp
from aiohttp.abc import AbstractResolver

from outbox.core import cloudevents, webhooks
from outbox.core.durations import Seconds, as_lifetime, configured
from outbox.core.errors import ConfigurationError, described
from outbox.core.loops import cancelled_from_outside
from outbox.core.message import Message
from outbox.core.transport import Defaults, Features, Published, Refusal, Report, Transport, unreported
from outbox.transports.http.answers import is_taken, refusal
from outbox.transports.http.client import HttpClient
from outbox.transports.http.destination import LIKE_A_TOKEN, HttpDestination
from outbox.transports.http.options import HttpOptions
from outbox.transports.http.ssrf import AddressRefused, CheckedResolver, check_url, checked_socket

__all__ = ["HttpTransport", "check_url"]

CONCURRENCY = 32
WITHIN = timedelta(seconds=15)  # for an answer
LONGEST_WITHIN = timedelta(seconds=20)
BATCH_WITHIN = timedelta(seconds=25)  # for all answers to a batch: less than the relay gives it
TURN = 0.2  # seconds after which a batch lets others have a slot: with each message would take longer than some answers
KEEP_ALIVE = 4.0  # seconds that an idle connection is kept: less than servers do, so that few close under a request
SHORTEST_SECRET = 6  # characters: what is shorter would be found everywhere
NOT_YET = float("inf")  # when a request went out that has not
MOMENT = 0.01  # seconds in which answers are reported together
MOST_SILENT = 100  # messages without an answer that are remembered
AT_ONCE = 1.0  # seconds in which a request is sent again whose connection was closed under it

Mode = Literal["structured", "binary"]
Write = Callable[[Message, str], tuple[dict[str, str], bytes]]

_OPTIONS = HttpOptions()
_MODES: Mapping[str, Write] = {"structured": cloudevents.structured, "binary": cloudevents.binary}
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_OURS = ("content-", "ce-", "webhook-", "transfer-encoding", "host", "connection", "expect")


class HttpTransport(Transport):
    """One destination. 2xx means sent; what another answer means, and no answer, says `docs/learn/sending.md`."""

    name = "http"
    features = Features(
        consumes=False, delays=False, keeps_dead_letters=False, reports_answers=True, shares_outages=True
    )

    def __init__(
        self,
        url: str,
        *,
        source: str | None = None,  # default: the setting `source`
        mode: Mode = "structured",
        secrets: webhooks.AnySecrets | None = None,  # default: the setting `webhook_secrets`; () signs nothing
        untrusted: bool = False,  # the URL comes from a user: https, public addresses
        plain_http: bool = False,  # http:// to other machines, too
        concurrency: int = CONCURRENCY,  # requests under way at once
        timeout: Seconds = WITHIN,  # for an answer, connecting included
        headers: Mapping[str, str] | None = None,  # with every request
        name: str | None = None,  # of the route; default: the URL without user, password, query and tokens
        ssl_context: ssl.SSLContext | None = None,  # default: the authorities that this machine trusts
        resolver: AbstractResolver | None = None,  # default: this machine's
    ) -> None:
        self._destination = HttpDestination.of(url, plain_http=plain_http, untrusted=untrusted)
        self.route = name or self._destination.name
        self.address = self._destination.name
        if source is not None:
            cloudevents.check_source(source)
        self._source = source
        self._write = _checked_mode(mode)
        self._unsaid_secrets = secrets is None
        self._secrets = None if secrets is None or secrets == () else webhooks.Secrets.of(secrets)
        self._untrusted = untrusted
        self._concurrency = _checked_concurrency(concurrency)
        self._timeout = _checked_timeout(timeout)
        self._within = self._timeout.total_seconds()
        self._headers = _checked_headers(headers or {}, self._destination)
        self._secret = _secret_words(self._headers, self._destination)
        self._ssl_context = ssl_context
        self._resolver = resolver
        self._opened = 0  # several relays of a process may share this transport

    @classmethod
    def of(cls, url: str, defaults: Defaults) -> Self:
        """`https://example.com/events`, or `http://` on this machine."""
        transport = cls(url)
        transport.adopt(defaults)
        return transport

    def adopt(self, defaults: Defaults) -> None:
        options = defaults.chosen(HttpOptions)
        if self._source is None:
            self._source = options.source
        if self._unsaid_secrets:
            self._secrets = options.webhook_secrets

    def __repr__(self) -> str:
        """Where it sends to, without what may be secret in the URL."""
        return f"HttpTransport({self._destination.host!r})"

    async def open(self) -> None:
        """Connections are made when they are needed, and kept for the next request."""
        self._opened += 1
        if self._opened == 1:
            self._now = asyncio.get_running_loop().time
            self._slots = asyncio.Semaphore(self._concurrency)
            self._answered = float("-inf")  # when the destination last answered at all
            self._silent: dict[str, float] = {}  # when messages that were asked about alone got no answer
            self._client = HttpClient(self._destination.url, self._headers, self._connector())

    async def close(self) -> None:
        self._opened -= 1
        if not self._opened:
            await self._client.close()

    async def publish(self, messages: Sequence[Message], report: Report = unreported) -> Published:
        batch = _PostedBatch(iter(messages), self._now() + (BATCH_WITHIN - self._timeout).total_seconds(), report)
        with closing(batch):
            await asyncio.gather(*(self._work(batch) for _ in range(min(self._concurrency, len(messages)))))
        # Only now: a request may have failed before another one of its time was answered.
        alone = len(messages) == 1
        unexplained = [silence for silence in batch.silences if not self._is_refused(silence, batch, alone)]
        if alone:
            self._note_silence(messages[0].id, batch)
        why = unexplained[0].error if unexplained else ""
        published = Published(frozenset(batch.confirmed), batch.refused, why)
        return published if unexplained or published.answered else replace(published, asked=False)

    def _is_refused(self, silence: _Silence, batch: _PostedBatch, alone: bool) -> bool:
        """Whether a silence is about its message: others were answered since it went out, or was silent before."""
        went_out_at = silence.request.went_out_at
        was_silent_at = self._silent.get(silence.id, NOT_YET) if alone and went_out_at != NOT_YET else NOT_YET
        answered_meanwhile = self._answered > went_out_at
        if not answered_meanwhile and not self._answered > was_silent_at:
            return False
        text = f"{self._destination.host} answers others: {silence.error}"
        batch.refused[silence.id] = Refusal(text, unanswered=not answered_meanwhile)
        return True

    def _note_silence(self, id: str, batch: _PostedBatch) -> None:
        """Remember when a message that was asked about alone got no answer."""
        self._silent.pop(id, None)
        if any(silence.request.went_out_at != NOT_YET for silence in batch.silences):
            self._silent[id] = self._now()
            if len(self._silent) > MOST_SILENT:
                del self._silent[next(iter(self._silent))]

    async def _work(self, batch: _PostedBatch) -> None:
        """Post one message after the other. What cannot be answered within the relay's time is not begun."""
        while await self._slot(batch.last_start):
            try:
                until = min(self._now() + TURN, batch.last_start)
                for message in batch.messages:
                    await self._post(message, batch)
                    if self._now() > until:
                        break
                else:
                    return
            finally:
                self._slots.release()

    async def _slot(self, until: float) -> bool:
        """A destination among the requests under way, unless none is free in time."""
        if self._now() > until:
            return False
        if not self._slots.locked():
            return await self._slots.acquire()
        try:
            async with asyncio.timeout_at(until):
                return await self._slots.acquire()
        except TimeoutError:
            return False

    async def _post(self, message: Message, batch: _PostedBatch) -> None:
        sent = _SentRequest(self._now)
        try:
            request = self._request(message)
        except Exception as cause:  # noqa: BLE001 - another program wrote its row, and no later attempt can write it
            text = f"it cannot be written as a request: {described(cause)}"
            batch.refuse(message.id, Refusal(text, permanent=True, unanswered=True))
            return
        try:
            found = await self._answer(request, sent)
        except asyncio.CancelledError:
            if cancelled_from_outside():
                raise
            batch.silences.append(_Silence(message.id, sent, "the client gave up"))
        except TimeoutError:
            error = f"no answer within {self._timeout.total_seconds():g} s"
            batch.silences.append(_Silence(message.id, sent, error))
        except AddressRefused as error:
            batch.refuse(message.id, Refusal(f"{self._destination.host}: {error}"))
        except (aiohttp.ClientError, OSError) as error:
            batch.silences.append(_Silence(message.id, sent, self._hidden(described(error).encode()).decode()))
        except Exception as error:  # noqa: BLE001 - one message that cannot be sent must not take others with it
            batch.refuse(message.id, Refusal(described(error)))
        else:
            if found is None:
                batch.confirm(message.id)
            else:
                batch.refuse(message.id, found)

    def _request(self, message: Message) -> bytes:
        headers, body = self._write(message, self._source or _OPTIONS.source)
        if self._secrets is not None:
            headers |= webhooks.sign(self._secrets, message.id, int(time.time()), body)
        return self._client.request(headers, body)

    async def _answer(self, request: bytes, sent: _SentRequest) -> Refusal | None:
        """Why the destination does not take the message; None if it does."""
        began = self._now()
        over_a_kept_connection = began - self._answered < KEEP_ALIVE
        try:
            return await self._ask(request, sent)
        except aiohttp.ClientConnectionError as error:
            # A server may close a connection that it kept just as a request goes out. That tells nothing of either.
            at_once = self._now() - began < AT_ONCE
            if isinstance(error, aiohttp.ClientConnectorError) or not (over_a_kept_connection and at_once):
                raise
            return await self._ask(request, sent)

    async def _ask(self, request: bytes, sent: _SentRequest) -> Refusal | None:
        sent.went_out_at = NOT_YET
        async with asyncio.timeout(self._within):
            answer = await self._client.post(request, sent.went_out)
        self._answered = self._now()
        said = await answer.read()
        if is_taken(answer.status):
            return None
        found = refusal(answer.status, answer.headers.get("retry-after"), self._hidden(said), datetime.now(UTC))
        return replace(found, error=f"{self._destination.host}: {found.error}")

    def _hidden(self, text: bytes) -> bytes:
        """Without what a destination may repeat of a request and others must not see."""
        return self._secret.sub(b"***", text)

    def _connector(self) -> aiohttp.TCPConnector:
        guarded: dict[str, Any] = {"resolver": self._resolver}
        if self._untrusted:
            guarded = {"resolver": CheckedResolver(self._resolver), "socket_factory": checked_socket}
        return aiohttp.TCPConnector(
            limit=0,  # the slots are our own: no request waits here while its time runs
            keepalive_timeout=KEEP_ALIVE,
            ssl=self._ssl_context or True,
            **guarded,
        )


@dataclass(slots=True)
class _SentRequest:
    """A request on its way. Until it goes out, nothing that happens is about its message."""

    now: Callable[[], float]
    went_out_at: float = NOT_YET

    def went_out(self) -> None:
        self.went_out_at = self.now()


@dataclass(slots=True)
class _Silence:
    """A request that got no answer."""

    id: str
    request: _SentRequest
    error: str


class _PostedBatch:
    """Messages to post, and what became of them. Answers are reported as they come, those of a moment together."""

    def __init__(self, messages: Iterator[Message], last_start: float, report: Report) -> None:
        self.messages = messages  # shared by those who post them
        self.last_start = last_start  # by the loop's clock
        self.confirmed: set[str] = set()
        self.refused: dict[str, Refusal] = {}
        self.silences: list[_Silence] = []
        self._tell = report
        self._untold_confirmed: list[str] = []
        self._untold_refused: dict[str, Refusal] = {}
        self._timer: asyncio.TimerHandle | None = None

    def confirm(self, id: str) -> None:
        self.confirmed.add(id)
        self._untold_confirmed.append(id)
        if self._timer is None:
            self._report()

    def refuse(self, id: str, refusal: Refusal) -> None:
        self.refused[id] = self._untold_refused[id] = refusal
        if self._timer is None:
            self._report()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._tell_untold()

    def _report(self) -> None:
        """Now, and what comes next a moment later."""
        told = self._tell_untold()
        self._timer = asyncio.get_running_loop().call_later(MOMENT, self._report) if told else None

    def _tell_untold(self) -> bool:
        confirmed, refused = self._untold_confirmed, self._untold_refused
        if not confirmed and not refused:
            return False
        self._untold_confirmed, self._untold_refused = [], {}
        self._tell(Published(frozenset(confirmed), refused))
        return True


def _checked_mode(mode: str) -> Write:
    if mode not in _MODES:
        raise ConfigurationError(f"mode={mode!r}: one of {', '.join(map(repr, _MODES))}")
    return _MODES[mode]


def _checked_concurrency(concurrency: int) -> int:
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
        raise ConfigurationError(f"concurrency={concurrency!r}: a whole number, at least 1")
    return concurrency


def _checked_timeout(timeout: Seconds) -> timedelta:
    within = configured(as_lifetime, timeout, what="timeout")
    if within > LONGEST_WITHIN:
        raise ConfigurationError(f"timeout={within}: at most {LONGEST_WITHIN}, because a relay gives a batch no longer")
    return within


def _checked_headers(headers: Mapping[str, str], destination: HttpDestination) -> dict[str, str]:
    checked = {"user-agent": "transactional-outbox"}
    if destination.authorization is not None:
        checked["authorization"] = destination.authorization
    for name, value in headers.items():
        lower = name.lower()
        if lower.startswith(_OURS):
            raise ConfigurationError(f"the header {name!r} is written with each message: leave it out")
        if not _TOKEN.fullmatch(name) or not value.isascii() or not value.isprintable():
            raise ConfigurationError(f"the header {name!r}: headers are printable ASCII, names without spaces")
        checked[lower] = value
    return checked


def _secret_words(headers: Mapping[str, str], destination: HttpDestination) -> re.Pattern[bytes]:
    """Finds what travels with every request and may be secret: headers, the password, the query, tokens in the path."""
    values = [value for name, value in headers.items() if name != "user-agent"]
    queried = (value or name for name, value in destination.url.query.items())
    words = {word for value in (*values, destination.password, *queried) for word in value.split()}
    words |= {part for part in (*destination.url.parts, *destination.url.raw_parts) if LIKE_A_TOKEN.fullmatch(part)}
    secret = sorted((re.escape(word.encode()) for word in words if len(word) >= SHORTEST_SECRET), key=len, reverse=True)
    return re.compile(b"|".join(secret) or b"(?!)")
