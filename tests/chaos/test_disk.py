"""A disk that is full is really full, and one that cannot be had says why."""

from __future__ import annotations

import errno

import pytest

from tests.chaos.disk import Disk

SIZE = 4 * 1024 * 1024


def test_a_full_disk_refuses_the_next_byte_and_takes_it_once_it_is_freed() -> None:
    with Disk(SIZE) as disk:
        if disk.reason:
            pytest.skip(f"no file system can be mounted here: {disk.reason}")
        assert 0 < disk.fill() <= SIZE
        with pytest.raises(OSError, match=r"No space left") as refused, (disk.folder / "file").open("wb") as file:
            file.write(bytes(100_000))
        assert refused.value.errno == errno.ENOSPC
        disk.free()
        assert (disk.folder / "file").write_bytes(bytes(100_000)) == 100_000
    assert not disk.folder.exists()


def test_a_disk_that_cannot_be_mounted_is_a_plain_folder_and_a_reason() -> None:
    with Disk(-1) as disk:
        assert "mount" in disk.reason
        assert str(disk.folder) not in disk.reason
        (disk.folder / "file").write_bytes(b"kept")
    assert not disk.folder.exists()
