"""The guard: a URL from a user leads to a public address, or to nothing at all. No packet leaves this machine here."""

from __future__ import annotations

import socket
import ssl
import tomllib
from collections.abc import AsyncIterator
from ipaddress import ip_address, ip_network
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from outbox import ConfigurationError, Message, UrlRefused
from outbox.transports.http import HttpTransport, check_url, ssrf
from outbox.transports.http.ssrf import DENIED_IPV4, DENIED_IPV6, AddressRefused, check_address, checked_socket

PUBLIC = "93.184.215.14"

HOSTILE_URLS = [
    # Not https.
    "http://example.com/",
    "HTTP://example.com/",
    "ftp://example.com/",
    "file:///etc/passwd",
    "gopher://example.com/",
    "ws://example.com/",
    "unix:///var/run/docker.sock",
    "data:text/plain,hello",
    "javascript:alert(1)",
    "//example.com/",
    "example.com",
    "https:example.com",
    "https:/example.com",
    "",
    # No host, or a broken one.
    "https://",
    "https:///path",
    "https://:443/",
    "https://./",
    "https://../",
    "https://.example.com/",
    "https://example..com/",
    "https://-example.com/",
    "https://exa mple.com/",
    "https://example.com:0/",
    "https://example.com:65536/",
    "https://example.com:port/",
    "https://" + "a" * 64 + ".com/",
    "https://" + "a." * 130 + "com/",
    # This machine, by its names.
    "https://localhost/",
    "https://LOCALHOST/",
    "https://localhost./",
    "https://a.localhost/",
    "https://localhost.localdomain/",
    "https://printer.local/",
    "https://metadata.google.internal/computeMetadata/v1/",
    "https://router.home.arpa/",
    "https://intranet/",
    "https://metadata/",
    # IPv4 as it is.
    "https://127.0.0.1/",
    "https://127.1.2.3:8443/",
    "https://0.0.0.0/",
    "https://0.1.2.3/",
    "https://10.0.0.1/",
    "https://100.64.0.1/",
    "https://100.100.100.200/latest/meta-data/",
    "https://169.254.169.254/latest/meta-data/",
    "https://169.254.170.2/",
    "https://168.63.129.16/",
    "https://172.16.0.1/",
    "https://172.31.255.255/",
    "https://192.0.0.192/",
    "https://192.0.2.1/",
    "https://192.88.99.1/",
    "https://192.168.1.1/",
    "https://198.18.0.1/",
    "https://198.51.100.1/",
    "https://203.0.113.1/",
    "https://224.0.0.1/",
    "https://240.0.0.1/",
    "https://255.255.255.255/",
    # IPv4 in disguise.
    "https://2130706433/",
    "https://017700000001/",
    "https://0x7f000001/",
    "https://0x7f.0x0.0x0.0x1/",
    "https://0177.0.0.1/",
    "https://0177.0.0.01/",
    "https://127.1/",
    "https://127.0.1/",
    "https://0/",
    "https://0x0/",
    "https://127.0.0.1./",
    "https://127.0.0.1.:443/",
    "https://2852039166/",
    "https://0xa9fea9fe/",
    "https://0251.0376.0251.0376/",
    "https://169.254.43518/",
    "https://425.510.425.510/",
    "https://127.0.0.0x1/",
    "https://①②⑦.⓪.⓪.①/",
    "https://127。0。0。1/",
    "https://\uff11\uff12\uff17.0.0.1/",
    "https://%31%32%37.0.0.1/",
    "https://127%2e0%2e0%2e1/",
    "https://127.0.0.1%00.example.com/",
    # IPv6.
    "https://[::]/",
    "https://[::1]/",
    "https://[0:0:0:0:0:0:0:1]/",
    "https://[0000::0001]/",
    "https://[::127.0.0.1]/",
    "https://[::ffff:127.0.0.1]/",
    "https://[::ffff:7f00:1]/",
    "https://[::ffff:169.254.169.254]/",
    "https://[::ffff:0:127.0.0.1]/",
    "https://[64:ff9b::7f00:1]/",
    "https://[64:ff9b::169.254.169.254]/",
    "https://[64:ff9b:1::10.0.0.1]/",
    "https://[2002:7f00:1::]/",
    "https://[2002:a9fe:a9fe::]/",
    "https://[2001:0:7f00:1::]/",
    "https://[2001:db8::1]/",
    "https://[3fff::1]/",
    "https://[fc00::1]/",
    "https://[fd00:ec2::254]/",
    "https://[fe80::1]/",
    "https://[fe80::1%25eth0]/",
    "https://[fe80::1%eth0]/",
    "https://[fec0::1]/",
    "https://[ff02::1]/",
    "https://[100::1]/",
    "https://[5f00::1]/",
    "https://[4000::1]/",
    "https://[::1",
    "https://::1/",
    # User information, and what parsers disagree about.
    "https://user@example.com/",
    "https://user:password@example.com/",
    "https://@example.com/",
    "https://:@example.com/",
    "https://example.com@127.0.0.1/",
    "https://127.0.0.1@example.com/",
    "https://example.com:443@127.0.0.1/",
    "https://127.0.0.1\\@example.com/",
    "https://example.com\\@127.0.0.1/",
    "https://127.0.0.1#@example.com/",
    "https://127.0.0.1?@example.com/",
    "https:\\\\127.0.0.1/",
    "https://127.0.0.1\t/",
    "https://exam\r\nple.com/",
    "https://example.com/\r\nHost: 127.0.0.1",
    " https://example.com/",
    "https://example.com /",
    "https://ex\u00adample.com/",
    "https://localhost\u3002/",
]

GOOD_URLS = [
    "https://example.com/",
    "https://EXAMPLE.com:8443/hooks?token=a%20b",
    "https://hooks.example.co.uk/a/b/c",
    "https://xn--bcher-kva.example/",
    "https://93.184.215.14/",
    "https://[2606:4700:4700::1111]/",
    "https://0x7f.example.com/",
    "https://127.0.0.1.example.com/",  # an ordinary name; what it resolves to is checked later
    "https://a_b.example.com/",
]


def test_there_are_enough_hostile_urls() -> None:
    assert len(set(HOSTILE_URLS)) == len(HOSTILE_URLS) >= 80


class NoResolver(AbstractResolver):
    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> list[ResolveResult]:
        raise AssertionError(f"{host} was resolved")

    async def close(self) -> None: ...


@pytest.mark.parametrize("url", HOSTILE_URLS)
def test_a_hostile_url_is_refused_when_it_is_given(url: str) -> None:
    with pytest.raises(UrlRefused) as raised:
        HttpTransport(url, untrusted=True, resolver=NoResolver())
    assert "password" not in str(raised.value).replace("no password", "")


@pytest.mark.parametrize("url", GOOD_URLS)
def test_an_ordinary_url_is_taken(url: str) -> None:
    assert check_url(url).scheme == "https"
    HttpTransport(url, untrusted=True)


@pytest.mark.parametrize("url", [None, 12, b"https://example.com/", ["https://example.com/"]])
def test_what_is_no_text_is_refused(url: Any) -> None:
    with pytest.raises(UrlRefused):
        check_url(url)


# Addresses.


@pytest.mark.parametrize("network", [*DENIED_IPV4, *DENIED_IPV6], ids=str)
def test_both_ends_of_a_denied_network_are_denied(network: Any) -> None:
    for address in (network[0], network[-1]):
        with pytest.raises(AddressRefused):
            check_address(str(address))


@pytest.mark.parametrize(
    "address",
    ["1.1.1.1", "8.8.8.8", PUBLIC, "100.63.255.255", "100.128.0.0", "172.15.255.255", "172.32.0.0", "192.0.1.0",
     "198.17.255.255", "198.20.0.0", "223.255.255.255", "2606:4700:4700::1111", "2a00:1450:4001::1", "2001:200::1",
     "2003::1", "2001:4860:4860::8888", "3ffe:ffff:ffff::1"],
)  # fmt: skip
def test_a_public_address_is_not_denied(address: str) -> None:
    check_address(address)


def test_no_address_that_python_calls_private_is_let_through() -> None:
    """Python's own list is shorter than ours, and must be part of it."""
    exceptions = [ip_network("192.0.0.0/24"), ip_network("2001::/23")]
    samples = [network[offset] for network in _private() for offset in (0, -1)]
    for address in samples:
        if ip_address(address).is_private and not any(address in each for each in exceptions):
            with pytest.raises(AddressRefused):
                check_address(str(address))


def _private() -> list[Any]:
    names = ["0.0.0.0/8", "10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"]
    names += ["198.18.0.0/15", "240.0.0.0/4", "::1/128", "::/128", "::ffff:0:0/96", "100::/64", "2001:db8::/32"]
    return [ip_network(name) for name in (*names, "fc00::/7", "fe80::/10", "64:ff9b:1::/48")]


@pytest.mark.parametrize("text", ["", "localhost", "127.0.0.1.", "0177.0.0.1", "fe80::1%eth0", "::ffff:8.8.8.8"])
def test_what_is_no_plain_public_address_is_denied(text: str) -> None:
    with pytest.raises(AddressRefused):
        check_address(text)


# Resolving and connecting.


class Resolver(AbstractResolver):
    """Gives other answers each time, as a hostile name server does."""

    def __init__(self, *answers: list[str]) -> None:
        self._answers = list(answers)
        self.asked = 0

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> list[ResolveResult]:
        answer = self._answers[min(self.asked, len(self._answers) - 1)]
        self.asked += 1
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST,
            )
            for address in answer
        ]

    async def close(self) -> None: ...


class Sockets:
    """Stands where sockets are made: notes which address would be connected to, and connects to none."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __call__(self, *arguments: Any, **options: Any) -> socket.socket:
        raise ConnectionRefusedError("a test connects to nothing")


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Sockets:
    sockets = Sockets()

    def make(address: Any) -> socket.socket:
        check_address(str(address[4][0]))
        sockets.made.append(str(address[4][0]))
        return sockets()

    monkeypatch.setattr("outbox.transports.http.checked_socket", make)
    return sockets


@pytest.fixture
async def published(sockets: Sockets) -> AsyncIterator[Any]:
    async def publish(resolver: AbstractResolver, url: str = "https://hooks.example.com/") -> Any:
        transport = HttpTransport(url, untrusted=True, resolver=resolver)
        await transport.open()
        try:
            return await transport.publish([Message(routing_key="a", body=b"1", tracking_ids=("m",))])
        finally:
            await transport.close()

    yield publish


@pytest.mark.parametrize(
    "addresses",
    [["127.0.0.1"], ["10.0.0.1"], ["169.254.169.254"], ["::1"], ["::ffff:127.0.0.1"], ["64:ff9b::7f00:1"],
     [PUBLIC, "127.0.0.1"], ["127.0.0.1", PUBLIC], [PUBLIC, "fd00::1"], ["2606:4700:4700::1111", "::1"]],
    ids=", ".join,
)  # fmt: skip
async def test_a_host_with_even_one_denied_address_is_never_connected_to(
    addresses: list[str], published: Any, sockets: Sockets
) -> None:
    found = await published(Resolver(addresses))
    assert sockets.made == []
    assert not found.confirmed
    assert not found.refused["m"].permanent  # names can be mended
    assert "no public address" in found.refused["m"].error


async def test_what_was_checked_is_what_is_connected_to(published: Any, sockets: Sockets) -> None:
    rebinding = Resolver([PUBLIC], ["127.0.0.1"])
    found = await published(rebinding)
    assert set(sockets.made) == {PUBLIC}
    assert rebinding.asked == 1
    assert (found.confirmed, found.refused) == (frozenset(), {})  # nobody answered: in doubt


async def test_a_name_that_changes_between_two_messages_is_checked_again(published: Any, sockets: Sockets) -> None:
    rebinding = Resolver([PUBLIC], ["127.0.0.1"])
    await published(rebinding)
    found = await published(rebinding)
    assert set(sockets.made) == {PUBLIC}
    assert "127.0.0.1" in found.refused["m"].error


async def test_a_resolver_that_lies_to_the_check_is_caught_at_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last gate: even with the check of resolved addresses gone, no socket is made."""
    monkeypatch.setattr(ssrf.CheckedResolver, "resolve", Resolver(["127.0.0.1"]).resolve)
    made: list[Any] = []
    monkeypatch.setattr(ssrf, "socket", SimpleNamespace(socket=lambda **options: made.append(options)))
    transport = HttpTransport("https://hooks.example.com/", untrusted=True)
    await transport.open()
    try:
        found = await transport.publish([Message(routing_key="a", body=b"1", tracking_ids=("m",))])
    finally:
        await transport.close()
    assert made == []
    assert "no public address" in found.refused["m"].error


def test_the_last_gate_makes_sockets_for_public_addresses_only() -> None:
    with checked_socket((socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (PUBLIC, 443))) as made:
        assert not made.getblocking()
    with pytest.raises(AddressRefused):
        checked_socket((socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 443)))


async def test_an_untrusted_session_takes_no_proxy_and_no_password_from_the_environment(
    published: Any, sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1/")
    await published(Resolver([PUBLIC]))
    assert set(sockets.made) == {PUBLIC}


# URLs of one's own.


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/", "http://localhost/", "http://[::1]:9000/a"])
def test_http_is_fine_on_this_machine(url: str) -> None:
    HttpTransport(url)


@pytest.mark.parametrize("url", ["http://example.com/", "http://10.0.0.1/", "http://localhost.example.com/"])
def test_http_to_other_machines_has_to_be_asked_for(url: str) -> None:
    with pytest.raises(ConfigurationError, match="plain_http"):
        HttpTransport(url)
    HttpTransport(url, plain_http=True)


@pytest.mark.parametrize("url", ["", "https://", "amqp://host/", "https://[::1", "https://h:99999/", "nonsense", None])
def test_what_is_no_url_is_refused_without_being_shown(url: Any) -> None:
    with pytest.raises(ConfigurationError, match="for example https://"):
        HttpTransport(url)


def test_what_may_be_secret_in_a_url_is_not_shown() -> None:
    transport = HttpTransport("https://user:c4n4ry@example.com/hooks?token=c4n4ry#c4n4ry")
    assert "c4n4ry" not in repr(transport)
    assert transport.route == "https://example.com/hooks"
    with pytest.raises(ConfigurationError) as raised:
        HttpTransport("http://user:c4n4ry@example.com/hooks?token=c4n4ry")
    assert "c4n4ry" not in str(raised.value)


def test_the_name_of_a_route_can_be_given_and_is_never_too_long() -> None:
    assert HttpTransport("https://example.com/", name="billing").route == "billing"
    route = HttpTransport("https://example.com/" + "ü" * 300).route
    assert route is not None
    assert len(route.encode()) <= 255


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "batched"},
        {"concurrency": 0},
        {"concurrency": True},
        {"concurrency": 1.5},
        {"timeout": 0},
        {"timeout": -1},
        {"timeout": 21},
        {"secrets": "no secret"},
        {"secrets": []},
        {"headers": {"webhook-id": "x"}},
        {"headers": {"Content-Type": "x"}},
        {"headers": {"ce-id": "x"}},
        {"headers": {"Host": "x"}},
        {"headers": {"x": "a\r\nb: c"}},
        {"headers": {"x y": "a"}},
        {"headers": {"x": "ü"}},
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(options: Any) -> None:
    with pytest.raises(ConfigurationError):
        HttpTransport("https://example.com/", **options)


async def test_tls_is_verified_unless_a_context_says_otherwise() -> None:
    for given, expected in ((None, True), (ssl.create_default_context(), ssl.SSLContext)):
        transport = HttpTransport("https://example.com/", ssl_context=given)
        await transport.open()
        connector = transport._client._connector
        assert isinstance(connector, aiohttp.TCPConnector)
        assert connector._ssl is True if expected is True else isinstance(connector._ssl, ssl.SSLContext)
        await transport.close()


def test_versions_of_aiohttp_that_read_headers_without_end_are_not_allowed() -> None:
    """Before 3.13.4 an answer whose headers never end takes gigabytes before its time is over."""
    with Path(__file__).parents[2].joinpath("pyproject.toml").open("rb") as file:
        [bound] = tomllib.load(file)["project"]["optional-dependencies"]["http"]
    assert bound == "aiohttp>=3.13.4,<4"
