"""Certificates: an authority of this run's own, and what it signs."""

from __future__ import annotations

from pathlib import Path

from outbox.testing.servers.ladder import find, from_debian, installed
from outbox.testing.servers.programs import account

_LADDER = (installed("openssl", folders="/usr/bin"), from_debian("openssl", folders="usr/bin"))
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


def make_certificates(folder: Path, *, host: str, key_usage: bool = True) -> None:
    """ca.pem, and certificate.pem with key.pem for one host. Python 3.13 refuses an authority without its key usage."""
    folder.mkdir(parents=True)
    account().owns(folder)
    openssl = find("openssl", _LADDER, "Install openssl (Debian, Ubuntu: apt-get install openssl)")

    def run(*command: str) -> None:
        openssl.run(["openssl", *command], folder=folder)

    authority = ("-subj", "/CN=An authority for tests", "-keyout", "ca.key", "-out", "ca.pem")
    usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign") if key_usage else ()
    run("req", "-x509", *_KEY, *authority, "-addext", "basicConstraints=critical,CA:TRUE", *usage)
    run("req", "-new", *_KEY[:-2], "-subj", f"/CN={host}", "-keyout", "key.pem", "-out", "request.pem")
    (folder / "extensions").write_text(f"subjectAltName=DNS:{host}\nauthorityKeyIdentifier=keyid\n")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "extensions", "-days", "2")
    run("x509", "-req", "-in", "request.pem", *signed, "-out", "certificate.pem")
    (folder / "request.pem").unlink()
