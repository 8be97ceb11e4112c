"""Guard: URLs that come from users lead to public addresses and nowhere else.

A URL is checked when it is given, every address that its host resolves to when a connection is made, and the address
of each socket before it connects: what was checked is what is connected to.
"""

from __future__ import annotations

import re
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from aiohappyeyeballs import AddrInfoType
from aiohttp import ThreadedResolver
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from outbox.core.errors import UrlRefused, named

# What Python's `is_global` says depends on its version, and it lets tunnels to private networks pass.
DENIED_IPV4 = tuple(
    ip_network(each)
    for each in (
        "0.0.0.0/8",  # this network; connects to this machine
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # shared by carriers and clouds
        "127.0.0.0/8",  # this machine
        "168.63.129.16/32",  # a cloud's own services, on a public address
        "169.254.0.0/16",  # this link, and most clouds' metadata
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocols, and a cloud's metadata
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",  # AS112
        "192.52.193.0/24",  # multicast tunnels
        "192.88.99.0/24",  # relays of 6to4
        "192.168.0.0/16",  # private
        "192.175.48.0/24",  # AS112
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)
# The first three are everything but 2000::/3: mapped IPv4, NAT64, loopback, private, link-local, multicast, `::`.
DENIED_IPV6 = tuple(
    ip_network(each)
    for each in (
        "::/3",
        "4000::/2",
        "8000::/1",
        "2001::/23",  # protocols: Teredo and others that hold an IPv4 address
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: holds an IPv4 address
        "2620:4f:8000::/48",  # AS112
        "3fff::/20",  # documentation
    )
)
_LOCAL = ("localhost", "local", "localdomain", "internal", "intranet", "lan", "home", "corp", "home.arpa", "onion")
_HOST = re.compile(r"(?=.{1,253}\Z)([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)+[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_NUMERIC = re.compile(r"(0x[0-9a-f]*|[0-9]+)")  # a last label that resolvers read as part of an address
_USER_INFORMATION = re.compile(r"[a-z]+://[^/?#]*@", re.IGNORECASE)
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\]|[^\x00-\x7f]")


class AddressRefused(Exception):
    """A host leads to an address that URLs from users must not lead to."""


def check_url(text: str) -> URL:
    """A URL that came from a user, as the client understands it; raises UrlRefused, before any packet is sent."""
    if not isinstance(text, str) or _UNSAFE.search(text):
        raise UrlRefused("a URL from a user is ASCII without spaces and backslashes; write other hosts as xn--…")
    try:
        url = URL(text)
        host, port, _ = url.raw_host or "", url.port, url.host  # which errors show, and not every one can be decoded
    except (ValueError, IndexError):  # yarl raises the latter for some brackets
        raise UrlRefused("this is no URL: write for example https://example.com/webhooks") from None
    if url.scheme != "https":
        raise UrlRefused("a URL from a user begins with https://")
    if _USER_INFORMATION.match(text):
        raise UrlRefused("a URL from a user holds no user name and no password")
    if not port:
        raise UrlRefused("a URL from a user has a port that one can connect to")
    _check_host(host)
    return url


def check_address(text: str) -> None:
    """Refuse an address that is not out in the public network."""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        raise AddressRefused(f"{named(text)} is no address") from None
    if _is_denied(address):
        raise AddressRefused(f"its host leads to {address}, and that is no public address")


class CheckedResolver(AbstractResolver):
    """Resolves, and refuses a host of whose addresses even one is denied."""

    def __init__(self, resolver: AbstractResolver | None = None) -> None:
        self._resolver = resolver or ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        for each in found:
            check_address(each["host"])
        return found

    async def close(self) -> None:
        await self._resolver.close()


def checked_socket(address: AddrInfoType) -> socket.socket:
    """A socket for one address, checked again: this is what is connected to, whatever resolved it."""
    family, kind, protocol, _, place = address
    check_address(str(place[0]))
    made = socket.socket(family=family, type=kind, proto=protocol)
    made.setblocking(False)
    return made


def _check_host(host: str) -> None:
    host = host.lower()
    try:
        address = ip_address(host)
    except ValueError:
        if _NUMERIC.fullmatch(host.rpartition(".")[2]) or not _HOST.fullmatch(host):
            raise UrlRefused(f"the host {named(host)}: write the full name of a host, as in example.com") from None
        if any(host == each or host.endswith(f".{each}") for each in _LOCAL):
            raise UrlRefused(f"the host {named(host)} is a name for a private network") from None
        return
    if _is_denied(address):
        raise UrlRefused(f"the host {named(host)} is no public address")


def _is_denied(address: IPv4Address | IPv6Address) -> bool:
    denied = DENIED_IPV4 if isinstance(address, IPv4Address) else DENIED_IPV6
    return any(address in network for network in denied)
