"""Hostile URLs: put together from parts that parsers read differently, the same with every run."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

INDEX_ERRORS = ["https://_1[1]f@?", "https://a[1]@/", "https://[1]a@#", "https://x[::1]@"]

SCHEMES = [
    "https",
    "https",
    "https",
    "https",
    "https",
    "http",
    "HTTPS",
    "file",
    "ftp",
    "gopher",
    "",
    "javascript",
    "https:https",
]
SEPARATORS = ["://", "://", "://", "://", "://", ":/", ":", "//", ":///", ":\\\\", "://\t"]
USERS = [
    "",
    "",
    "",
    "",
    "",
    "user@",
    "user:password@",
    "@",
    ":@",
    "a@b@",
    "%40@",
    "[1]@",
    "example.com#@",
    "example.com\\@",
]
HOSTS = [
    *(
        "example.com",
        "hooks.example.org",
        "EXAMPLE.com",
        "xn--bcher-kva.example",
        "93.184.215.14",
        "[2606:4700:4700::1111]",
    ),
    *("localhost", "localhost.", "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "10.0.0.1", "a"),
    *(
        "[2606:4700:4700::1111]",
        "192.168.1.1",
        "169.254.169.254",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[fe80::1%25eth0]",
        "[fd00::1]",
    ),
    *("[64:ff9b::7f00:1]", "metadata.google.internal", "example.local", "-a.example", "a..b", ".example.com"),
    *("example.com.", "*.example.com", "[", "]", "[]", "[1]", "_1[1]f", "[::1", "::1", "[v1.a]", "[::1]a", "a[::1]"),
    *("%6c%6f%63alhost", "0", "0.0.0.1", "1.1.1.1.1", "256.1.1.1", "example.com%00", "example.com%2f", "xn--", "xn--a"),
    *("", "\u2147xample.com", "example\u3002com", "\u2460\u2461\u2466.0.0.1", "exa mple.com", "exam\u00adple.com"),
    *("127.0.0.1.example.com", "100.64.0.1", "x" * 64 + ".com", "a." * 130 + "com"),
]
PORTS = ["", "", "", "", ":443", ":8443", ":0", ":", ":65536", ":-1", ":99999999999", ":a", ":443:443", ":٤٤٣", ":+1"]
PATHS = [
    "",
    "/",
    "/hooks",
    "/a/b?c=d",
    "?",
    "#",
    "?@example.com",
    "#@example.com",
    "/\\example.com",
    "/..;/",
    "//x",
    "/%00",
]
PIECES = [
    "[",
    "]",
    "@",
    ":",
    "/",
    "\\",
    "%",
    "#",
    "?",
    "\x00",
    "\n",
    "\u2028",
    "é",
    "%5b",
    "1",
    ".",
    "-",
    "_",
    " ",
    "\ud800",
]


def hostile_urls(random: Random) -> Iterator[str]:
    """Without an end."""
    yield from INDEX_ERRORS
    choice = random.choice
    while True:
        url = choice(SCHEMES) + choice(SEPARATORS) + choice(USERS) + choice(HOSTS) + choice(PORTS) + choice(PATHS)
        for _ in range(choice((0, 0, 1, 1, 2))):
            at = random.randrange(len(url) + 1)
            url = url[:at] + choice(PIECES) + url[at + choice((0, 0, 1)) :]
        yield url
