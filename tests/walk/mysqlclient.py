"""mysqlclient: the driver MySQLdb, installed or unpacked from Debian's package, since there is no wheel of it."""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from functools import cache
from typing import Any

import pytest

from outbox.testing.servers.ladder import Absent, from_debian


@cache
def mysqldb() -> Any:
    """The module MySQLdb; a test that asks for it is skipped where it cannot be had."""
    try:
        import MySQLdb
    except ImportError:
        _unpack()
        import MySQLdb
    import MySQLdb.connections

    return MySQLdb


def _unpack() -> None:
    found = from_debian("python3-mysqldb", folders="usr/lib/python3/dist-packages")()
    if isinstance(found, Absent):
        pytest.skip(f"mysqlclient is not installed, and {found.reason}")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if not (found.folder / f"MySQLdb/_mysql{suffix}").exists():
        pytest.skip(f"mysqlclient is not installed, and Debian's is not for this Python ({suffix})")
    for folder in found.libraries:
        for library in folder.glob("libmariadb.so.3"):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # the search path of libraries was read at the start
    sys.path.append(str(found.folder))
